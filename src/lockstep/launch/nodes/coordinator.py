"""Coordinator on launcher 0: one decision for all launchers, from their reports. Pure.

reports:    alive, done, a failure, leaving
decisions:  restart   the same launchers start their workers again
            round     another round begins, without those that are lost or leave, or with newcomers
            end       the launch is over, with a verdict
            done      the launch is over, and all went well
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lockstep.launch.agent.failure import Verdict
from lockstep.launch.nodes.membership import Membership
from lockstep.launch.nodes.messages import (
    Answer,
    Decision,
    FailureReport,
    LauncherReport,
    lost_verdict,
)

#: A launcher that has sent nothing for as long is lost.
LOST_SECONDS = 15.0
#: A launcher whose connection has ended is gone, unless it connects again within this time.
_GONE_SECONDS = 2.5
#: A launcher that is silent for as long may be the cause of the others' failures.
_SILENT_SECONDS = 1.5
#: How long the cause is waited for, once a consequence is known.
_SETTLE_SECONDS = 2.0
#: How long others have to leave too, once a launcher leaves that can save the run's state.
_LEAVE_SECONDS = 0.7

#: Returns the line for the user if workers are to start again after a failure; `None` if they are not.
Policy = Callable[[Verdict], str | None]


class Coordinator:
    """The coordinator of a round.

    Args:
        membership: the launchers of the round.
        now: the time, in seconds of any clock, as in all calls.
        policy: which failures are followed by new workers.
        least: how many launchers an elastic launch needs; `None` for one of a fixed size.
        generation: number of the round's first generation.
    """

    def __init__(
        self,
        membership: Membership,
        now: float,
        *,
        policy: Policy,
        least: int | None,
        generation: int,
    ) -> None:
        self._membership = membership
        self._policy = policy
        self._least = least
        self._first_leaves: float | None = None
        self._saves = False
        self._generation = generation
        self._reports = {
            index: LauncherReport(index=index, generation=-1) for index in range(membership.count)
        }
        self._heard = dict.fromkeys(range(membership.count), now)
        self._gone: dict[int, float] = {}
        self._first_failed: float | None = None
        self._newcomers: tuple[str, ...] = ()
        self._restart = Decision(kind="restart")
        self._port = 0
        #: The decision on this generation.
        self.decision: Decision | None = None
        self._readers: set[int] = set()

    def receive(self, report: LauncherReport, now: float) -> Answer:
        """Return the answer to a launcher's report.

        Raises:
            KeyError: if it takes no part in the round.
        """
        if report.index not in self._reports:
            raise KeyError(report.index)
        self._reports[report.index] = report
        self._heard[report.index] = now
        self._gone.pop(report.index, None)
        if report.heard:
            self._readers.add(report.index)
        self.look(now)
        decision = self.decision
        if decision is not None and (decision.is_last or report.generation == self._generation):
            return Answer(decision=decision)
        if report.generation < self._generation:
            return Answer(decision=self._restart)
        if report.generation > self._generation:
            return Answer()
        return Answer(port=self._port, saves=self._saves)

    def disconnect(self, index: int, now: float) -> None:
        """Note that the connection of a launcher has ended."""
        self._gone.setdefault(index, now)

    def note(self, lost: Sequence[int], newcomers: Sequence[str], now: float) -> None:
        """Note which launchers cannot reach this one any more, and the names of newcomers."""
        self._gone.update((index, now - _GONE_SECONDS - 1) for index in lost if index > 0)
        self._newcomers = tuple(newcomers)
        self.look(now)

    def supersede(self) -> None:
        """Note that others have begun another round without this one."""
        self._decide(Decision(kind="round", text="a newer round has begun without this node"))

    def enter(self, generation: int) -> None:
        """Begin another generation, without the decision on the one before."""
        if self.decision is not None and self.decision.is_last:
            return
        self._restart = self.decision or self._restart
        self._generation, self.decision, self._port = generation, None, 0
        self._first_failed = self._first_leaves = None
        self._saves = False

    @property
    def all_entered(self) -> bool:
        """Whether all launchers are in this generation: their earlier workers have ended."""
        return all(report.generation == self._generation for report in self._reports.values())

    @property
    def all_have_heard(self) -> bool:
        """Whether all other launchers have received the last decision."""
        return len(self._readers | {0}) == self._membership.count

    def open(self, port: int) -> None:
        """Answer all launchers with the port of this generation's store."""
        self._port = port

    def look(self, now: float) -> None:
        """Decide, if the reports allow it."""
        if self.decision is not None and self.decision.is_last:
            return
        reports = self._reports.values()
        here = [report for report in reports if report.generation == self._generation]
        failures = [report.failure for report in here if report.failure is not None]
        lost = self._lost(now)
        restarting = self.decision is not None
        if failures and not restarting and not all(failure.consequence for failure in failures):
            self._judge(failures)
        elif lost:
            self._lose(lost, now)
        elif restarting:
            return
        elif failures:
            self._judge_consequences(failures, now)
        elif leaving := [report for report in reports if report.leaves]:
            self._release(leaving, now)
        elif len(here) == self._membership.count and all(report.done for report in here):
            self._decide(Decision(kind="done"))
        elif self._newcomers and not any(report.done for report in here):
            names = " and ".join(self._newcomers)
            self._without(set(), f"{names} {'come' if len(self._newcomers) > 1 else 'comes'}")

    def _decide(self, decision: Decision) -> None:
        if self.decision is None or not self.decision.is_last:
            self.decision = decision

    def _judge(self, failures: list[FailureReport]) -> None:
        verdict = min(failures, key=lambda failure: failure.order).verdict
        line = self._policy(verdict)
        if line is None:
            self._decide(Decision(kind="end", verdict=verdict))
        else:
            self._decide(Decision(kind="restart", text=line))

    def _judge_consequences(self, failures: list[FailureReport], now: float) -> None:
        """Wait for the cause, or for the end of a launcher that is silent: it may be the cause."""
        if self._first_failed is None:
            self._first_failed = now
        is_early = now - self._first_failed <= _SETTLE_SECONDS
        silent = any(self._silence(index, now) > _SILENT_SECONDS for index in self._reports)
        if len(failures) == self._membership.count or not (is_early or silent):
            self._judge(failures)

    def _silence(self, index: int, now: float) -> float:
        # Launcher 0's own reports need no connection.
        return 0.0 if index == 0 else now - self._heard[index]

    def _release(self, leaving: list[LauncherReport], now: float) -> None:
        """Continue without those that leave; if too few stay, let all save the run's state and leave."""
        if self._first_leaves is None:
            self._first_leaves = now
        # A scheduler that ends one launcher may be about to end all.
        is_early = now - self._first_leaves <= _LEAVE_SECONDS
        enough = self._membership.count - len(leaving) >= (self._least or 0)
        if not all(report.saves for report in leaving) or (enough and not is_early):
            self._without(set(), "; ".join(report.leaves for report in leaving))
        elif not is_early:
            self._saves = True
            if all(report.done for report in self._reports.values()):
                self._decide(Decision(kind="done"))

    def _lost(self, now: float) -> dict[int, str]:
        """Return the launchers that are lost, and why."""
        found = {}
        for index in self._reports:
            if index in self._gone and now - self._gone[index] > _GONE_SECONDS:
                found[index] = "its launcher has ended, or cannot be reached"
            elif self._silence(index, now) > LOST_SECONDS:
                found[index] = f"no sign of its launcher for {LOST_SECONDS:.0f} s"
        return found

    def _lose(self, lost: dict[int, str], now: float) -> None:
        index, why = min(lost.items())
        verdict = lost_verdict(self._membership.names[index], why)
        if self._least is not None:
            # A launcher that is silent by now is not waited for.
            limit = 2 * _SILENT_SECONDS
            silent = {other for other in self._reports if self._silence(other, now) > limit}
            self._without({*lost, *silent}, verdict.text.removeprefix("lockstep: "))
        else:
            self._decide(Decision(kind="end", verdict=verdict))

    def _without(self, leaving: set[int], text: str) -> None:
        leaving |= {report.index for report in self._reports.values() if report.leaves}
        staying = tuple(index for index in self._reports if index not in leaving)
        self._decide(Decision(kind="round", text=text, staying=staying))
