"""How often snapshots are taken: as often as they cost little."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping

import torch

from lockstep.checkpoint.memory import Board
from lockstep.checkpoint.snapshot import Snapshots

#: The part of the time that snapshots may take.
_SHARE = 0.015
#: Snapshots before the cost is believed: the first in each half touch pages for the first time.
_WARM = 2


class Rhythm:
    """Takes snapshots at some of the points.

    The first rank of a launcher measures what one costs, and says on the board when the next is due; the
    other ranks follow. They have seen it by then, since no rank gets through a step without the first.

    Args:
        snapshots: the memory.
        board: where the ranks of this launcher look.
        leads: whether this is the first rank of its launcher.
    """

    def __init__(self, snapshots: Snapshots, board: Board, *, leads: bool) -> None:
        self._snapshots, self._board, self._leads = snapshots, board, leads
        self._preparing: threading.Thread | None = None
        self._number = snapshots.number
        self._taken = 0
        self._last = (0, 0.0)

    def is_due(self, point: int) -> bool:
        """Return whether a snapshot is due at this point."""
        return any(planned == point for planned, _ in self._board.snapshots)

    @property
    def needs_memory(self) -> bool:
        """Whether this rank is to take memory, since nobody has yet."""
        if not self._leads or self._last[0]:
            return False
        return self._preparing is None or not self._preparing.is_alive()

    def prepare(self, point: int, text: str, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """Take memory for a state of this size; once it is there, the next point has a snapshot.

        Returns:
            Why there will be no snapshots, in words; `None` where there will be.
        """
        if not self._snapshots.is_ready(tensors):
            if missing := self._snapshots.missing(tensors):
                self._last = (point, time.monotonic())
                wanted, free = (size / 1e9 for size in missing)
                return f"snapshots would take {wanted:.1f} GB of memory, and {free:.1f} GB are free"
            self._preparing = self._snapshots.prepare(text, tensors)
            if self._preparing is not None:
                return None
        self._last = (point, time.monotonic())
        self._board.plan_snapshot(point + 1, self._number)
        return None

    def take(self, point: int, text: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the snapshot that is due: all ranks of the launcher do so at this point."""
        began = time.monotonic()
        number = next(number for planned, number in self._board.snapshots if planned == point)
        self._snapshots.write(number, text, tensors)
        now = time.monotonic()
        self._taken += 1
        if self._leads:
            self._number = number + 1
            interval = self._interval(point, began, now - began)
            self._board.plan_snapshot(point + interval, self._number)
            self._last = (point, now)

    def _interval(self, point: int, began: float, cost: float) -> int:
        last_point, last_time = self._last
        if self._taken <= _WARM:
            return 1
        step = (began - last_time) / (point - last_point)
        return max(1, math.ceil(cost / (_SHARE * max(step, 1e-9))))
