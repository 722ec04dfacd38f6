"""Progress of this launcher's ranks, read from the shared status page."""

from __future__ import annotations

import os

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


class RankProgress:
    """What the launcher sees of its ranks' runs.

    Args:
        memory: made before the fork server, which hands it to the workers.
        ranks: how many ranks this launcher starts.
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
    def progress(self) -> tuple[bytes, int]:
        """The newest snapshot: its run and its number."""
        return progress(self._memory)

    @property
    def origin(self) -> str:
        """From where the next generation continues, to be said after a restart; empty for nowhere."""
        tag, number = self.progress
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
