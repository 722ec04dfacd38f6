"""Memory that frames are received into, used again and again: new pages take longer than to fill them."""

from __future__ import annotations

from collections import defaultdict

import torch


class Pool:
    """Memory by its size."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)

    def take(self, size: int) -> torch.Tensor:
        """Return `size` bytes."""
        free = self._free[size]
        return free.pop() if free else torch.empty(size, dtype=torch.uint8)

    def give(self, memory: torch.Tensor) -> None:
        """Take back what `take` has given."""
        self._free[memory.numel()].append(memory)


class Lease:
    """Memory that goes back to its pool when it has been sent to all who are to have it.

    Args:
        pool: where it goes.
        memory: what was taken there.
        readers: how many are to have it.
    """

    def __init__(self, pool: Pool, memory: torch.Tensor, readers: int) -> None:
        self._pool, self._memory, self._readers = pool, memory, readers

    def done(self) -> None:
        """One more has it."""
        self._readers -= 1
        if not self._readers:
            self._pool.give(self._memory)
