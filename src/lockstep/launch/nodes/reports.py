"""`Reports`: the last report of each launcher, and the launchers that are done, have failed, or leave."""

from __future__ import annotations

from lockstep.launch.agent.failure import FailureReport
from lockstep.launch.nodes.messages import LauncherReport


class Reports:
    """The last report of each launcher, and sets of launchers by the contents of that report.

    `store` updates the sets, so that the coordinator need not read all reports at each message.

    Attributes:
        here: launchers whose last report is about the current generation (the workers since the last
            restart); `done`, `failed` and `causes` are among them.
        done: launchers whose workers have all succeeded.
        failed: launchers with a failure.
        causes: launchers with a failure that does not follow from another rank's failure.
        leaving: launchers that leave.
    """

    def __init__(self, count: int, generation: int) -> None:
        self._last = [LauncherReport(index=index, generation=-1) for index in range(count)]
        self._generation = generation
        self.here, self.done = set[int](), set[int]()
        self.failed, self.causes, self.leaving = set[int](), set[int](), set[int]()

    def __getitem__(self, index: int) -> LauncherReport:
        return self._last[index]

    def failures(self) -> list[FailureReport]:
        """Return the failures since the last restart of the workers, in the order of launchers."""
        return [one for index in sorted(self.failed) if (one := self._last[index].failure)]

    def store(self, report: LauncherReport) -> None:
        """Store `report` as the last one of its launcher, and update the sets of launchers."""
        self._last[report.index] = report
        failure, here = report.failure, report.generation == self._generation
        for launchers, belongs in (
            (self.here, here),
            (self.done, here and report.done),
            (self.failed, here and failure is not None),
            (self.causes, here and failure is not None and not failure.consequence),
            (self.leaving, bool(report.leaves)),
        ):
            if belongs:
                launchers.add(report.index)
            else:
                launchers.discard(report.index)

    def begin(self, generation: int) -> None:
        """Set the number of the current generation: the workers between two restarts."""
        self._generation = generation
        for report in self._last:
            self.store(report)
