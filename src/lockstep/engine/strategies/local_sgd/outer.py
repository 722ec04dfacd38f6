"""Updates of parameters by averages over ranks: the mean (local SGD) or a Nesterov step (DiLoCo)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class _Change:
    """Computes the change of this rank's parameters since ranks last averaged their parameters."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        # The parameters after the last average.
        self._anchors = [parameter.detach().clone() for parameter in parameters]

    def begin(self) -> None:
        """Save a copy of the parameters, before the first step after ranks have averaged them."""
        torch._foreach_copy_(self._anchors, self._now())

    def _now(self) -> list[torch.Tensor]:
        # Not cached: a script may replace a parameter's memory.
        return [parameter.detach() for parameter in self._parameters]

    def outgoing(self) -> list[torch.Tensor]:
        """Return this rank's change of each parameter since the last average: old minus new value."""
        return list(torch._foreach_sub(self._anchors, self._now()))


class Mean(_Change):
    """Local SGD: sets parameters to their mean over the ranks (Stich, ICLR 2019, arXiv:1805.09767).

    The mean is taken of the changes since the last average. So a parameter that no rank has changed keeps
    its bits.
    """

    def finish(self, means: Sequence[torch.Tensor]) -> None:
        """Set each parameter to its value after the last averaging minus its mean change.

        `means`: the mean over all ranks of each parameter's change, old minus new value.
        """
        torch._foreach_copy_(self._now(), torch._foreach_sub(self._anchors, list(means)))

    def state(self) -> dict[str, Any]:
        """Return an empty state: local SGD has no outer optimizer."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Ignore `state`: local SGD has no outer optimizer."""


class Nesterov(_Change):
    """DiLoCo: updates parameters by an outer SGD optimizer with Nesterov momentum.

    The outer optimizer's gradient is the mean change of the parameters over ranks. Learning rate and
    momentum are those of Douillard et al. 2023 (arXiv:2311.08105).
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(parameters)
        self._optimizer = torch.optim.SGD(self._anchors, lr=0.7, momentum=0.9, nesterov=True)

    def finish(self, means: Sequence[torch.Tensor]) -> None:
        """Step the outer optimizer, and copy the updated values to the parameters.

        `means`: the mean change of each parameter over all ranks, which is the gradient of the step.
        """
        for anchor, mean in zip(self._anchors, means, strict=True):
            anchor.grad = mean
        self._optimizer.step()
        self._optimizer.zero_grad()
        torch._foreach_copy_(self._now(), self._anchors)

    def state(self) -> dict[str, Any]:
        """Return the `state_dict` of the outer optimizer, which contains its momentum."""
        return self._optimizer.state_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the `state_dict` of the outer optimizer."""
        self._optimizer.load_state_dict(dict(state))


Outer = Mean | Nesterov
