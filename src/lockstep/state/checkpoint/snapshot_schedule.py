"""Interval of snapshots: as short as their cost in training time allows."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping

import torch

from lockstep.state.checkpoint.shared_memory import StatusPage
from lockstep.state.checkpoint.snapshot import Snapshots

#: The part of the time that snapshots may take by themselves. What they do to the processor's caches
#: comes on top, and is nothing that could be timed here.
_SHARE = 0.01
#: Snapshots before the cost is believed: the first in each buffer touch pages for the first time.
_WARM = 2


class SnapshotSchedule:
    """Takes snapshots after some of the steps; `taken` counts them, alike on all ranks of the launcher.

    The first rank of a launcher measures what one costs, and says on the status page after which step
    the next is due; the other ranks follow. They have seen it by then, since no rank gets through a step
    without the first. Between two points without a step in between, at the end of an epoch, that does not
    hold: there is at most one snapshot for each step.

    Args:
        snapshots: the memory.
        page: the status page of this launcher's ranks.
        leads: whether this is the first rank of its launcher.
        ahead: by how many steps another rank may be ahead of that one.
    """

    def __init__(
        self, snapshots: Snapshots, page: StatusPage, *, leads: bool, ahead: int = 0
    ) -> None:
        self._snapshots, self._page, self._leads = snapshots, page, leads
        self._least = ahead + 1
        self._preparing: threading.Thread | None = None
        self.number = snapshots.number  # of the next snapshot
        self.taken = 0
        self._steps = 0
        self._last: tuple[int, float] | None = None

    def go_on(self, steps: int) -> None:
        """Resume after `steps`, where memory is there: the next step has a snapshot.

        So a generation that is killed after its first step leaves that step.
        """
        self._steps = steps
        self._last = (steps, time.monotonic())
        if self._leads:
            # No rank has begun a step yet: none is ahead.
            self._page.plan_snapshot(steps + 1, self.number)

    def due(self, steps: int) -> int:
        """Return the number of the snapshot due after `steps`; 0 for none. Call it once at each point."""
        before, self._steps = self._steps, steps
        return max(number if before < step <= steps else 0 for step, number in self._page.snapshots)

    def postpone(self) -> None:
        """Take the snapshot that is due now after the next step."""
        if self._leads:
            self._page.plan_snapshot(self._steps + self._least, self.number)

    @property
    def needs_memory(self) -> bool:
        """Whether this rank is to take memory, since no rank has yet."""
        if not self._leads or self._last is not None:
            return False
        return self._preparing is None or not self._preparing.is_alive()

    def prepare(self, text: str, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """Take memory for a state of this size; once it is there, the next step has a snapshot.

        Returns:
            Why there will be no snapshots, for a message; `None` where there will be.
        """
        if not self._snapshots.is_ready(tensors):
            if missing := self._snapshots.missing(tensors):
                self._last = (self._steps, time.monotonic())
                wanted, free = (size / 1e9 for size in missing)
                return f"snapshots would take {wanted:.1f} GB of memory, and {free:.1f} GB are free"
            self._preparing = self._snapshots.prepare(text, tensors)
            if self._preparing is not None:
                return None
        self._last = (self._steps, time.monotonic())
        self._page.plan_snapshot(self._steps + self._least, self.number)
        return None

    def take(
        self, number: int, text: str, tensors: Mapping[str, torch.Tensor], began: float
    ) -> None:
        """Take the snapshot that is due: all ranks of the launcher do so at this point.

        `began` is when work on it began, on the monotonic clock: to gather the state takes time, too.
        """
        self._snapshots.write(number, text, tensors)
        now = time.monotonic()
        self.taken += 1
        self.number = number + 1
        if self._leads and self._last is not None:
            interval = self._interval(began, now - began)
            self._page.plan_snapshot(self._steps + interval, self.number)
            self._last = (self._steps, now)

    def _interval(self, began: float, cost: float) -> int:
        assert self._last is not None, "memory was taken before"
        last_steps, last_time = self._last
        if self.taken <= _WARM:
            return self._least
        step = (began - last_time) / max(1, self._steps - last_steps)
        return max(self._least, math.ceil(cost / (_SHARE * max(step, 1e-9))))
