"""Outer step of local SGD and DiLoCo: the mean, or Nesterov momentum on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch


class Outer(Protocol):
    """Makes one model of those that the ranks have come to."""

    def begin(self) -> None:
        """All ranks hold the same parameters, and are about to go ways of their own."""

    def outgoing(self) -> list[torch.Tensor]:
        """Return what this rank gives to the mean, one tensor per parameter."""

    def finish(self, means: Sequence[torch.Tensor]) -> None:
        """Give the parameters what follows from the mean of what the ranks gave."""

    def state(self) -> dict[str, Any]:
        """Return the state of the outer step besides the parameters; the same on all ranks."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what `state` returned."""


class _Way:
    """The way that a rank has gone since all were one.

    Args:
        parameters: of the model.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        # Where all ranks were one. When they are one again it is where the parameters are.
        self._anchors = [parameter.detach().clone() for parameter in parameters]

    def begin(self) -> None:
        """Remember where the way begins: the script may have loaded other weights since the last one."""
        torch._foreach_copy_(self._anchors, self._now())

    def _now(self) -> list[torch.Tensor]:
        # Asked for anew each time: a script may give a parameter other memory.
        return [parameter.detach() for parameter in self._parameters]

    def outgoing(self) -> list[torch.Tensor]:
        """Return the way of this rank, backwards, as gradients point."""
        return list(torch._foreach_sub(self._anchors, self._now()))


class Mean(_Way):
    """Local SGD: the mean of the parameters (Stich, ICLR 2019, arXiv:1805.09767).

    It is taken of the ways. So a parameter that no rank has moved keeps its bits, whatever ranks weigh.
    """

    def finish(self, means: Sequence[torch.Tensor]) -> None:
        """Take the mean."""
        torch._foreach_copy_(self._now(), torch._foreach_sub(self._anchors, list(means)))

    def state(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """There is nothing to take."""


class Nesterov(_Way):
    """DiLoCo: the ranks' mean way is a gradient for an outer optimizer, SGD with Nesterov momentum.

    Learning rate and momentum are those of the paper: Douillard et al. 2023 (arXiv:2311.08105).

    Args:
        parameters: of the model.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__(parameters)
        self._optimizer = torch.optim.SGD(self._anchors, lr=0.7, momentum=0.9, nesterov=True)

    def finish(self, means: Sequence[torch.Tensor]) -> None:
        """Let the outer optimizer go the mean way."""
        for anchor, mean in zip(self._anchors, means, strict=True):
            anchor.grad = mean
        self._optimizer.step()
        self._optimizer.zero_grad()
        torch._foreach_copy_(self._now(), self._anchors)

    def state(self) -> dict[str, Any]:
        """Return the outer momentum."""
        return self._optimizer.state_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        """Take the outer momentum."""
        self._optimizer.load_state_dict(dict(state))
