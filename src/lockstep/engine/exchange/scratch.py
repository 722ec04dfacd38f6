"""Buffers for sums, reused by every backward pass."""

from __future__ import annotations

import torch


class Scratch:
    """Memory that serves every backward pass anew: to get new pages takes longer than to fill them.

    On a GPU, torch keeps memory by itself.
    """

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []
        self._taken = 0

    def take(self, like: torch.Tensor, numel: int) -> torch.Tensor:
        """Return a flat tensor of `numel` elements, `like` another, that is free in this pass."""
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
        """Let all of it be taken again; sums of the pass that ends are still to be read."""
        self._taken = 0
