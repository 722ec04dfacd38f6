"""Decide after which steps snapshots are taken, so that they cost at most 1 % of the training time."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping

import torch

from lockstep.state.checkpoint.shared_memory import StatusPage
from lockstep.state.checkpoint.snapshot import Snapshots

#: The share of the training time that taking snapshots may cost. Evicted processor caches cost more time,
#: which cannot be measured here.
_SHARE = 0.01
#: Number of first snapshots whose cost is not measured: the first in each buffer is slow, it touches pages.
_WARM = 2
#: Number of the latest snapshots whose median cost counts: a snapshot sometimes waits for a late rank.
_RECENT = 5


class SnapshotSchedule:
    """Decides after which steps snapshots are taken, and takes them.

    The first rank of a launcher measures the cost of a snapshot, and writes the step of the next one to the
    shared `page`. The other ranks read that step when they have completed a step. The first rank has then
    completed the step, too, so that all ranks read the same value. At most one snapshot is taken per step.

    Args:
        leads: whether this is the first rank of its launcher.
        ahead: the number of steps by which another rank may be ahead of the first one.
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
        self._costs: deque[float] = deque(maxlen=_RECENT)

    def go_on(self, steps: int) -> None:
        """Start the schedule after a resume from step `steps`: a snapshot is due after the next step.

        The memory for snapshots must be allocated already.
        """
        self._steps = steps
        self._last = (steps, time.monotonic())
        if self._leads:
            # No rank has begun a step yet, so none is ahead of the plan.
            self._page.plan_snapshot(steps + 1, self.number)

    def due(self, steps: int) -> int:
        """Return the number of the snapshot due after step `steps`; 0 for none.

        The caller calls this once at each point where the state is complete: after each step, and at the
        end of each epoch.
        """
        before, self._steps = self._steps, steps
        return max(number if before < step <= steps else 0 for step, number in self._page.snapshots)

    def postpone(self) -> None:
        """Postpone the snapshot that is due now to after the next step, or `ahead` steps later."""
        if self._leads:
            self._page.plan_snapshot(self._steps + self._least, self.number)

    @property
    def needs_memory(self) -> bool:
        """Whether to call `prepare`: on a launcher's first rank, until the first snapshot is planned.

        `False` while a thread allocates the memory.
        """
        if not self._leads or self._last is not None:
            return False
        return self._preparing is None or not self._preparing.is_alive()

    def prepare(self, text: str, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """Make sure that there is memory for snapshots of `tensors`, then plan the first snapshot.

        `text`: the state without its tensors. If a thread allocates the memory, nothing is planned yet, and
        the caller calls this method again when the thread has ended.

        Returns:
            The reason why there will be no snapshots, for a message; `None` if there will be
                snapshots.
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
        """Take snapshot `number`, which is due; all the launcher's ranks call this after the same step.

        `text` is the state without `tensors`. `began` is the `time.monotonic()` at which the caller began
        to gather the state; the time since then counts as cost of the snapshot.
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
        self._costs.append(cost)
        step = (began - last_time) / max(1, self._steps - last_steps)
        share = _SHARE * max(step, 1e-9)
        return max(self._least, math.ceil(statistics.median_low(self._costs) / share))
