"""What becomes of the ranks' models when they meet again after steps of their own."""

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
        """Return what the next meeting depends on, besides the parameters; the same on all ranks."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Take what `state` returned."""


class Mean:
    """Local SGD: the mean of the parameters (Stich, ICLR 2019, arXiv:1805.09767).

    Args:
        parameters: of the model.
    """

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters

    def begin(self) -> None:
        """Nothing is to be remembered."""

    def outgoing(self) -> list[torch.Tensor]:
        """Return the parameters."""
        return [parameter.detach() for parameter in self._parameters]

    def finish(self, means: Sequence[torch.Tensor]) -> None:
        """Take the mean."""
        _copy(self.outgoing(), means)

    def state(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load(self, state: Mapping[str, Any]) -> None:
        """There is nothing to take."""


class Nesterov:
    """DiLoCo: the ranks' mean way is a gradient for an outer optimizer, SGD with Nesterov momentum.

    Learning rate and momentum are those of the paper: Douillard et al. 2023 (arXiv:2311.08105).

    Args:
        parameters: of the model.
        lr: outer learning rate.
        momentum: outer momentum.
    """

    def __init__(
        self, parameters: Sequence[torch.Tensor], lr: float = 0.7, momentum: float = 0.9
    ) -> None:
        self._parameters = parameters
        # Where all ranks were one. When they are one again it is where the parameters are.
        self._anchors = [parameter.detach().clone() for parameter in parameters]
        self._optimizer = torch.optim.SGD(self._anchors, lr=lr, momentum=momentum, nesterov=True)

    def begin(self) -> None:
        """Remember where the way begins: the script may have loaded other weights since the last one."""
        _copy(self._anchors, [parameter.detach() for parameter in self._parameters])

    def outgoing(self) -> list[torch.Tensor]:
        """Return the way of this rank, backwards, as gradients point."""
        now = [parameter.detach() for parameter in self._parameters]
        return list(torch._foreach_sub(self._anchors, now))

    def finish(self, means: Sequence[torch.Tensor]) -> None:
        """Let the outer optimizer go the mean way."""
        for anchor, mean in zip(self._anchors, means, strict=True):
            anchor.grad = mean
        self._optimizer.step()
        self._optimizer.zero_grad()
        _copy([parameter.detach() for parameter in self._parameters], self._anchors)

    def state(self) -> dict[str, Any]:
        """Return the outer momentum."""
        return self._optimizer.state_dict()

    def load(self, state: Mapping[str, Any]) -> None:
        """Take the outer momentum."""
        self._optimizer.load_state_dict(dict(state))


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    torch._foreach_copy_(list(targets), list(sources))
