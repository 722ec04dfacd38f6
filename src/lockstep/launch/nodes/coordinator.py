"""`Coordinator`: makes one decision for all launchers, on launcher 0, from their reports.

`LauncherReport` with a `FailureReport`, and `Answer` with a `Decision`, are the messages between launchers
and coordinator, sent as JSON.

reports:    alive, done, a failure, leaving
decisions:  restart   the same launchers start their workers again
            round     a rendezvous round with other launchers begins: some are lost or leave, or join
            end       the launch has failed, with one message for all launchers
            done      the launch has succeeded
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from lockstep.launch.agent.failure import Decision, FailureReport, Kind, Policy, Verdict
from lockstep.launch.nodes.membership import Membership

#: The longest message, in bytes.
LINE = 1 << 20
#: Seconds without a report after which a launcher counts as lost.
LOST_SECONDS = 15.0
#: Seconds that a launcher has to connect again after its connection ended, before it counts as lost.
_GONE_SECONDS = 2.5
#: Seconds without a report after which a launcher may be the cause of failures on other launchers.
_SILENT_SECONDS = 1.5
#: Seconds to wait for the cause of failures that only follow from another rank's failure.
_SETTLE_SECONDS = 2.0
#: Seconds to wait for further launchers that leave, once a launcher leaves whose ranks can save the state.
_LEAVE_SECONDS = 0.7


def shortened(report: FailureReport) -> FailureReport:
    """Return the report; replace its failure message by a short one if it is too long to send."""
    size = len(json.dumps(asdict(report)))
    if size <= LINE // 2:  # an answer contains the message and its first line
        return report
    name = report.verdict.name or "a launcher"
    text = (
        f"lockstep: {name} failed, and its verdict of {size} bytes is too long for "
        f"the other launchers; expected at most {LINE // 2}: its log says more"
    )
    brief = text.removeprefix("lockstep: ")
    verdict = replace(report.verdict, text=text, traceback=None, brief=brief)
    return replace(report, verdict=verdict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherReport:
    """State of a launcher, sent with every heartbeat.

    Attributes:
        done: whether all workers of the launcher have succeeded.
        failure: failure of its workers, if any.
        leaves: reason for which the launcher leaves; empty if it stays.
        saves: whether a launcher that leaves can wait until all ranks have saved the run's state.
        heard: whether the launcher has received the last decision.
    """

    index: int
    round: int = 1
    generation: int
    done: bool = False
    failure: FailureReport | None = None
    leaves: str = ""
    saves: bool = False
    heard: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The coordinator's answer to a launcher's report.

    Attributes:
        port: port of the workers' store; 0 while it is not open.
        saves: whether all ranks are to save the run's state and exit.
    """

    decision: Decision | None = None
    port: int = 0
    saves: bool = False


def lost_verdict(name: str, why: str, *, hint: str | None = None) -> Verdict:
    """Return the failure message of a launch that has lost launcher `name` for the reason `why`."""
    lines = [f"lockstep: {name} was lost: {why}", *([f"  hint: {hint}"] if hint else [])]
    return Verdict(text="\n".join(lines), exit_code=1, name=None, traceback=None, kind=Kind.LOST)


class Coordinator:
    """Decides, for all launchers of a rendezvous round, when workers start again and when the launch ends.

    Args:
        membership: the launchers of the round, a period in which the same launchers take part.
        now: current time in seconds, of the same clock as in all other calls.
        policy: restart policy.
        least: minimum number of launchers of an elastic launch; `None` for a fixed size.
        generation: number of the round's first start of workers.
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
        #: Decision since the last start of workers; `None` before one is made.
        self.decision: Decision | None = None
        self._readers: set[int] = set()

    def receive(self, report: LauncherReport, now: float) -> Answer:
        """Store a launcher's report, make a decision if one is due, and return the answer.

        Raises:
            KeyError: if the launcher takes no part in the round.
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
        """Record that the connection of a launcher has ended."""
        self._gone.setdefault(index, now)

    def note(self, lost: Sequence[int], newcomers: Sequence[str], now: float) -> None:
        """Record which launchers lost their connection to launcher 0, and the names of new launchers."""
        self._gone.update((index, now - _GONE_SECONDS - 1) for index in lost if index > 0)
        self._newcomers = tuple(newcomers)
        self.look(now)

    def supersede(self) -> None:
        """End this round: other launchers have begun another round without launcher 0."""
        self._decide(Decision(kind="round", text="a newer round has begun without this node"))

    def enter(self, generation: int) -> None:
        """Prepare the next start of workers, number `generation`: clear the last decision."""
        if self.decision is not None and self.decision.is_last:
            return
        self._restart = self.decision or self._restart
        self._generation, self.decision, self._port = generation, None, 0
        self._first_failed = self._first_leaves = None
        self._saves = False

    @property
    def all_entered(self) -> bool:
        """Whether all launchers have stopped their earlier workers and wait for the next start."""
        return all(report.generation == self._generation for report in self._reports.values())

    @property
    def all_have_heard(self) -> bool:
        """Whether all other launchers have received the last decision."""
        return len(self._readers | {0}) == self._membership.count

    def open(self, port: int) -> None:
        """Set the port of the workers' store, which all launchers get in their next answer."""
        self._port = port

    def look(self, now: float) -> None:
        """Make a decision if the reports, or missing reports, require one."""
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
        """Decide on failures that all follow from another one, after a wait for the report of that one."""
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
        """Continue without launchers that leave; if too few stay, all ranks save the state and exit."""
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
        """Return the launchers that are lost, each with the reason."""
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
            # Do not wait for launchers that have been silent for some seconds.
            limit = 2 * _SILENT_SECONDS
            silent = {other for other in self._reports if self._silence(other, now) > limit}
            self._without({*lost, *silent}, verdict.text.removeprefix("lockstep: "))
        else:
            self._decide(Decision(kind="end", verdict=verdict))

    def _without(self, leaving: set[int], text: str) -> None:
        leaving |= {report.index for report in self._reports.values() if report.leaves}
        staying = tuple(index for index in self._reports if index not in leaving)
        self._decide(Decision(kind="round", text=text, staying=staying))
