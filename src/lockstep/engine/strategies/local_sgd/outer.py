"""Outer step of local SGD and DiLoCo: the mean, or Nesterov momentum on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class _Change:
    """The change of a rank's parameters since the last average."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        # The parameters after the last average.
        self._anchors = [parameter.detach().clone() for parameter in parameters]

    def begin(self) -> None:
        """Copy the parameters, before the first step: the script may have loaded other weights."""
        torch._foreach_copy_(self._anchors, self._now())

    def _now(self) -> list[torch.Tensor]:
        # Not kept: a script may give a parameter other memory.
        return [parameter.detach() for parameter in self._parameters]

    def outgoing(self) -> list[torch.Tensor]:
        """Return the change of this rank, with the sign of a gradient."""
        return list(torch._foreach_sub(self._anchors, self._now()))


class Mean(_Change):
    """Local SGD: the mean of the parameters (Stich, ICLR 2019, arXiv:1805.09767).

    It is taken of the changes: a parameter that no rank has changed keeps its bits, whatever the weights.
    """

    def finish(self, means: Sequence[torch.Tensor]) -> None:
        """Set the parameters to the mean."""
        torch._foreach_copy_(self._now(), torch._foreach_sub(self._anchors, list(means)))

    def state(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load nothing."""


class Nesterov(_Change):
    """DiLoCo: the ranks' mean change is a gradient for an outer optimizer, SGD with Nesterov momentum.

    Learning rate and momentum are those of the paper: Douillard et al. 2023 (arXiv:2311.08105).
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(parameters)
        self._optimizer = torch.optim.SGD(self._anchors, lr=0.7, momentum=0.9, nesterov=True)

    def finish(self, means: Sequence[torch.Tensor]) -> None:
        """Let the outer optimizer step with the mean change as gradient."""
        for anchor, mean in zip(self._anchors, means, strict=True):
            anchor.grad = mean
        self._optimizer.step()
        self._optimizer.zero_grad()
        torch._foreach_copy_(self._now(), self._anchors)

    def state(self) -> dict[str, Any]:
        """Return the outer momentum."""
        return self._optimizer.state_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the outer momentum."""
        self._optimizer.load_state_dict(dict(state))


Outer = Mean | Nesterov
