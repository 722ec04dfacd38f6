"""Restart policy: which failures start a new generation, and how often; and the progress of ranks.

A failure that came from outside the script (a signal, a lost node, a full disk) need not come again. An
exception of the script's own would: the run is a function of its script, so the same step fails the same
way. Failures are counted in a row, and begin at one again when the run has moved on meanwhile.
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

#: How many failures in a row without progress a run survives, unless the user gives a number.
DEFAULT = 3


class RankProgress:
    """Progress of the runs of this launcher's ranks.

    Args:
        memory: made before the fork server, from which the workers inherit it.
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
        """Begin a generation, after the last worker of the one before has ended."""
        self._opened = self.opened
        self._page.clear()

    @property
    def pids(self) -> set[int]:
        """Process ids of the ranks of this generation that have opened a run."""
        return {slot.pid for slot in self.slots} - {0}

    @property
    def opened(self) -> bool:
        """Whether any rank of any generation has opened a run."""
        return self._opened or bool(self.pids)

    def is_inside(self, index: int) -> bool:
        """Whether the `index`-th rank of this launcher has opened a run, and not come to its end."""
        slot = self.slots[index] if index < len(self.slots) else None
        return slot is not None and slot.pid != 0 and slot.waiting != AFTER_RUN

    @property
    def step(self) -> int:
        """Steps that the run has done."""
        return max(slot.step for slot in self.slots)

    @property
    def snapshot(self) -> tuple[bytes, int]:
        """The newest snapshot: its run and its number."""
        return progress(self._memory)

    @property
    def origin(self) -> str:
        """Where the next generation continues from, in the message of a restart; empty for nowhere."""
        tag, number = self.snapshot
        if not number:
            return ""
        run = run_of(tag)
        return f", from the newest snapshot{f' of run {run + 1} in the script' if run else ''}"

    def variables(self, index: int) -> dict[str, str]:
        """Return the variables by which the `index`-th rank of this launcher finds the memory."""
        return {
            VARIABLE: self._memory.variable(),
            "LOCKSTEP_SLOT": f"{index}/{self._ranks}",
            LAUNCHER_VARIABLE: str(os.getpid()),
        }


class Restarts:
    """The restart policy of a launch. With several launchers, that of launcher 0 decides for all.

    Args:
        limit: failures in a row without progress after which workers are started again; `None` for the
            default of a run, and none for a script without one.
        uses_lockstep: whether the script is known to use Lockstep before it has opened a run.
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
        """The number of restarts that scripts read as `TORCHELASTIC_MAX_RESTARTS`."""
        return self._limit or 0

    @property
    def is_run(self) -> bool:
        """Whether the script has a run of Lockstep's, whose state is kept."""
        return self._uses_lockstep or self._progress.opened

    def decide(self, verdict: Verdict) -> str | None:
        """Return the user's message if workers start again after a failure; `None` if they don't.

        The coordinator calls it in a thread of its own, on launcher 0; a launcher without others, itself.
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
        """Count a restart that another launcher has decided: this one may have to decide the next."""
        self._count_failure()
        self._count += 1

    def _count_failure(self) -> None:
        newest = self._progress.snapshot
        self._in_a_row = self._in_a_row + 1 if newest == self._last else 1
        self._last = newest
