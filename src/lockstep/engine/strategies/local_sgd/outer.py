"""Update of parameters by an outer SGD optimizer, whose gradient is their mean change over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


class OuterOptimizer:
    """Updates parameters at an average over ranks, by an outer SGD optimizer with Nesterov momentum.

    The outer optimizer's gradient is the mean over ranks of each parameter's change since the last average.
    With `lr=1` and without momentum, parameters become their mean over the ranks; a parameter that no rank
    has changed keeps its bits.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], *, lr: float, momentum: float) -> None:
        self._parameters = parameters
        # The parameters after the last average.
        self._anchors = [parameter.detach().clone() for parameter in parameters]
        self._has_momentum = momentum > 0
        self._optimizer = torch.optim.SGD(
            self._anchors, lr=lr, momentum=momentum, nesterov=self._has_momentum
        )

    def begin(self) -> None:
        """Save a copy of the parameters, before the first step after ranks have averaged them."""
        torch._foreach_copy_(self._anchors, self._now())

    def _now(self) -> list[torch.Tensor]:
        # Not cached: a script may replace a parameter's memory.
        return [parameter.detach() for parameter in self._parameters]

    def outgoing(self) -> list[torch.Tensor]:
        """Return this rank's change of each parameter since the last average: old minus new value."""
        return list(torch._foreach_sub(self._anchors, self._now()))

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
        """Return the outer optimizer's `state_dict` with its momentum; an empty one without momentum."""
        return self._optimizer.state_dict() if self._has_momentum else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the outer optimizer's `state_dict`; without momentum `state` has no effect."""
        if self._has_momentum:
            self._optimizer.load_state_dict(dict(state))
