"""Memory for sums of gradients, reused in every backward pass."""

from __future__ import annotations

import torch


class Scratch:
    """Pool of CPU tensors that are reused in every backward pass, since new memory pages are slow.

    On a GPU the pool is not used: torch's allocator reuses memory.
    """

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._taken = 0

    def take(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        """Return a flat tensor of `numel` elements that is not yet in use in this backward pass.

        The tensor has the type and device of `like`; its values are undefined.
        """
        if like.device.type != "cpu":
            return like.new_empty(numel)
        place, self._taken = self._taken, self._taken + 1
        if place == len(self._kept):
            self._kept.append(like.new_zeros(numel))
        kept = self._kept[place]
        if kept.numel() != numel or kept.dtype != like.dtype:
            kept = self._kept[place] = like.new_zeros(numel)
        return kept

    def pass_ends(self) -> None:
        """Release all tensors at the end of a backward pass, so that `take` returns the same ones again."""
        self._taken = 0
