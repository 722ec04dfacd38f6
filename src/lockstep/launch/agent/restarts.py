"""Restart policy: after which failures, and how often, all workers start again; and the ranks' progress.

A failure that came from outside the script (a signal, a lost node, a full disk) may not happen again. An
exception of the script would: a run is deterministic, so the same step fails the same way. Failures are
counted in a row; the count starts anew once the run has made progress after the last failure.
"""

from __future__ import annotations

import os

from lockstep.launch.agent.failure import Kind, Verdict
from lockstep.state.checkpoint.shared_memory import (
    AFTER_RUN,
    SLOTS,
    VARIABLE,
    Descriptors,
    Slot,
    StatusPage,
    progress,
    run_of,
)
from lockstep.state.files.lock import LAUNCHER_VARIABLE

#: Default number of failures in a row without progress after which workers still start again.
DEFAULT = 3


class RankProgress:
    """Progress of this launcher's ranks, read from memory that the launcher shares with them.

    Args:
        memory: the shared memory; workers inherit it through the fork server.
    """

    def __init__(self, memory: Descriptors, ranks: int) -> None:
        self._memory = memory
        self._ranks = ranks
        self._page = StatusPage(memory.page)
        self.slots: tuple[Slot, ...] = tuple(
            self._page.slot(index) for index in range(min(ranks, SLOTS))
        )
        self._opened = False

    def begin(self) -> None:
        """Clear the ranks' progress before the workers start again; all earlier workers have ended."""
        self._opened = self.opened
        self._page.clear()

    @property
    def pids(self) -> set[int]:
        """Process ids of the running ranks that have opened a `lockstep.Run`."""
        return {slot.pid for slot in self.slots} - {0}

    @property
    def opened(self) -> bool:
        """Whether any rank has opened a `lockstep.Run`, before or after the last restart."""
        return self._opened or bool(self.pids)

    def is_inside(self, index: int) -> bool:
        """Whether the `index`-th rank of this launcher has opened a run that has not finished."""
        slot = self.slots[index] if index < len(self.slots) else None
        return slot is not None and slot.pid != 0 and slot.waiting != AFTER_RUN

    @property
    def step(self) -> int:
        """Number of optimizer steps that the run has done."""
        return max(slot.step for slot in self.slots)

    @property
    def snapshot(self) -> tuple[bytes, int]:
        """Tag of a run, and number of its newest snapshot in memory; number 0 if there is none."""
        return progress(self._memory)

    @property
    def origin(self) -> str:
        """End of the message about a restart: which snapshot the run resumes from; empty without one."""
        tag, number = self.snapshot
        if not number:
            return ""
        run = run_of(tag)
        return f", from the newest snapshot{f' of run {run + 1} in the script' if run else ''}"

    def variables(self, index: int) -> dict[str, str]:
        """Return variables through which the `index`-th local rank finds the memory for its progress."""
        return {
            VARIABLE: self._memory.variable(),
            "LOCKSTEP_SLOT": f"{index}/{self._ranks}",
            LAUNCHER_VARIABLE: str(os.getpid()),
        }


class Restarts:
    """The restart policy of a launch; with several launchers, launcher 0 applies its own for all.

    Args:
        limit: maximum number of failures in a row without progress that are followed by a restart; `None`
            means `DEFAULT` for scripts that use Lockstep, 0 for other scripts.
        uses_lockstep: whether the script's source imports Lockstep.
    """

    def __init__(self, limit: int | None, progress: RankProgress, *, uses_lockstep: bool) -> None:
        self._limit = limit
        self._progress = progress
        self._uses_lockstep = uses_lockstep
        self._in_a_row = 0
        self._last: object = None
        self._count = 0  # generations after the first

    @property
    def limit(self) -> int:
        """Maximum number of restarts that workers read from the variable `TORCHELASTIC_MAX_RESTARTS`."""
        return self._limit or 0

    @property
    def is_run(self) -> bool:
        """Whether the script uses Lockstep, so that a restart resumes from the saved state."""
        return self._uses_lockstep or self._progress.opened

    def decide(self, verdict: Verdict) -> str | None:
        """Return the message to print if workers are to start again after a failure; otherwise `None`.

        With several launchers, the coordinator of launcher 0 calls this method, in its thread.
        """
        self._count_failure()
        limit = self._limit
        if limit is None:
            limit = DEFAULT if self.is_run and verdict.kind is not Kind.SCRIPT else 0
        if verdict.kind is Kind.REFUSED or self._in_a_row > limit:
            return None
        self._count += 1
        return f"{verdict.brief}; restart {self._count}{self._progress.origin}"

    def count_restart(self) -> None:
        """Count a restart that launcher 0 decided, since this launcher may become launcher 0 later."""
        self._count_failure()
        self._count += 1

    def _count_failure(self) -> None:
        newest = self._progress.snapshot
        self._in_a_row = self._in_a_row + 1 if newest == self._last else 1
        self._last = newest
