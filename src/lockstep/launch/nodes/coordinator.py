"""`Coordinator`: makes one decision for all launchers, on launcher 0, from their reports."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import takewhile

from lockstep.launch.agent.failure import Decision, Kind, Policy, Verdict
from lockstep.launch.nodes.membership import Membership
from lockstep.launch.nodes.messages import Answer, LauncherReport
from lockstep.launch.nodes.reports import Reports

#: Seconds between two reports of a launcher: the interval of few launchers, and the longest one, of which
#: five pass before a silent launcher counts as lost.
BEAT_SECONDS, _LONGEST_BEAT = 0.25, 3.0
#: Number of reports of all launchers together that arrive in a second; more launchers report less often.
_REPORTS_PER_SECOND = 1000
#: Seconds without a report after which a launcher counts as lost.
LOST_SECONDS = 15.0
#: Seconds that a launcher has to connect again after its connection ended, before it counts as lost.
_GONE_SECONDS = 2.5
#: Seconds, and intervals of reports, without a report after which a launcher may be the cause of failures
#: on other launchers.
_SILENT_SECONDS, _SILENT_BEATS = 1.5, 2
#: Seconds to wait for the cause of failures that only follow from another rank's failure.
_SETTLE_SECONDS = 2.0
#: Seconds to wait for further launchers that leave, once a launcher leaves whose ranks can save the state.
_LEAVE_SECONDS = 0.7


def beat_seconds(count: int) -> float:
    """Return the seconds between two reports of each of `count` launchers."""
    return min(max(BEAT_SECONDS, count / _REPORTS_PER_SECOND), _LONGEST_BEAT)


def lost_verdict(name: str, why: str, *, hint: str | None = None) -> Verdict:
    """Return the failure message of a launch that has lost launcher `name` for the reason `why`."""
    lines = [f"lockstep: {name} was lost: {why}", *([f"  hint: {hint}"] if hint else [])]
    return Verdict(text="\n".join(lines), exit_code=1, name=None, traceback=None, kind=Kind.LOST)


class Coordinator:
    """Decides, for all launchers of a rendezvous round, when workers start again and when the launch ends.

    The time to handle a message does not depend on the number of launchers.

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
        self._reports = Reports(membership.count, generation)
        # Time of the last report, and of the end of the connection, in the order of time. Launcher 0's own
        # reports need no connection.
        self._heard = OrderedDict.fromkeys(range(1, membership.count), now)
        self._gone = OrderedDict[int, float]()
        self._silent_seconds = max(_SILENT_SECONDS, _SILENT_BEATS * beat_seconds(membership.count))
        self._first_failed: float | None = None
        self._newcomers: tuple[str, ...] = ()
        self._restart = Decision(kind="restart")
        self._port = 0
        #: Decision since the last start of workers; `None` before one is made.
        self.decision: Decision | None = None
        self._readers = {0}
        #: Answers since the last change, by the generation of the report.
        self._answers: dict[int, Answer] = {}
        #: Number of changes of the answers.
        self.changes = 0

    def receive(self, report: LauncherReport, now: float) -> Answer:
        """Store a launcher's report, make a decision if one is due, and return the answer.

        `now` is the current time in seconds.

        Raises:
            KeyError: if the launcher takes no part in the round.
        """
        if not 0 <= report.index < self.count:
            raise KeyError(report.index)
        self._reports.store(report)
        if report.index > 0:
            self._heard[report.index] = now
            self._heard.move_to_end(report.index)
        self._gone.pop(report.index, None)
        if report.heard:
            self._readers.add(report.index)
        self.look(now)
        return self.answer(report.index)

    def answer(self, index: int) -> Answer:
        """Return the answer to the last report of launcher `index`.

        As long as the answer stays the same, all calls return the same object.
        """
        generation = self._reports[index].generation
        if generation not in self._answers:
            self._answers[generation] = self._answer(generation)
        return self._answers[generation]

    def _answer(self, generation: int) -> Answer:
        decision = self.decision
        if decision is not None and (decision.is_last or generation == self._generation):
            return Answer(generation=generation, decision=decision)
        if generation < self._generation:
            return Answer(generation=generation, decision=self._restart)
        if generation > self._generation:
            return Answer(generation=generation)
        return Answer(generation=generation, port=self._port, saves=self._saves)

    def _change(self) -> None:
        self._answers = {}
        self.changes += 1

    def disconnect(self, index: int, now: float) -> None:
        """Record that the connection of launcher `index` has ended, at time `now` in seconds."""
        self._gone.setdefault(index, now)

    def note(self, lost: Sequence[int], newcomers: Sequence[str], now: float) -> None:
        """Record lost launchers and waiting newcomers; then make a decision if one is due.

        The decision is to restart the workers, to change the launchers, or to end the launch. `lost`:
        indices of launchers that are cut off from launcher 0. `newcomers`: names of launchers that wait to
        join. `now`: current time in seconds.
        """
        for index in lost:
            if index > 0:
                self._gone[index] = now - _GONE_SECONDS - 1
                self._gone.move_to_end(index, last=False)
        self._newcomers = tuple(newcomers)
        self.look(now)

    def supersede(self) -> None:
        """End this rendezvous round, since other launchers have begun another one without launcher 0."""
        self._decide(Decision(kind="round", text="a newer round has begun without this node"))

    def enter(self, generation: int) -> None:
        """Clear the last decision, before all launchers start workers again.

        `generation` is the number of this start.
        """
        if self.decision is not None and self.decision.is_last:
            return
        self._restart = self.decision or self._restart
        self._generation, self.decision, self._port = generation, None, 0
        self._reports.begin(generation)
        self._first_failed = self._first_leaves = None
        self._saves = False
        self._change()

    @property
    def count(self) -> int:
        """Number of launchers."""
        return self._membership.count

    @property
    def all_entered(self) -> bool:
        """Whether all launchers have stopped their earlier workers and wait for the next start."""
        return len(self._reports.here) == self.count

    @property
    def all_have_heard(self) -> bool:
        """Whether all other launchers have received the last decision."""
        return len(self._readers) == self.count

    def open(self, port: int) -> None:
        """Set the port of the workers' store, which all launchers get in their next answer."""
        self._port = port
        self._change()

    def look(self, now: float) -> None:
        """Make a decision if reports, or missing reports, require one.

        The decision is to restart the workers, to change the launchers, or to end the launch.
        """
        if self.decision is not None and self.decision.is_last:
            return
        reports, restarting = self._reports, self.decision is not None
        if reports.causes and not restarting:
            self._judge()
        elif lost := self._lost(now):
            self._lose(lost, now)
        elif restarting:
            return
        elif reports.failed:
            self._judge_consequences(now)
        elif reports.leaving:
            self._release(now)
        elif len(reports.done) == self.count:
            self._decide(Decision(kind="done"))
        elif self._newcomers and not reports.done:
            names = " and ".join(self._newcomers)
            self._without(set(), f"{names} {'come' if len(self._newcomers) > 1 else 'comes'}")

    def _decide(self, decision: Decision) -> None:
        if self.decision is None or not self.decision.is_last:
            self.decision = decision
            self._change()

    def _judge(self) -> None:
        verdict = min(self._reports.failures(), key=lambda failure: failure.order).verdict
        line = self._policy(verdict)
        if line is None:
            self._decide(Decision(kind="end", verdict=verdict))
        else:
            self._decide(Decision(kind="restart", text=line))

    def _judge_consequences(self, now: float) -> None:
        """Decide on failures of which each may be a consequence of another rank's failure.

        The rank that failed first may not have been reported yet. The decision therefore waits some
        seconds, and as long as a launcher is silent. It is made at once if all launchers report failures.
        """
        if self._first_failed is None:
            self._first_failed = now
        is_early = now - self._first_failed <= _SETTLE_SECONDS
        silent = next(_older(self._heard, now - self._silent_seconds), None) is not None
        everywhere = len(self._reports.failed) == self.count
        if everywhere or not (is_early or silent):
            self._judge()

    def _release(self, now: float) -> None:
        """Decide to continue without the launchers that want to leave.

        If these launchers can wait, the decision comes a short time after the first of them asked, since
        more may ask. If too few launchers would stay then, all ranks save the run's state and exit instead.
        `now` is the current time.
        """
        if self._first_leaves is None:
            self._first_leaves = now
        # A scheduler that ends one launcher may be about to end all.
        is_early = now - self._first_leaves <= _LEAVE_SECONDS
        leaving = [self._reports[index] for index in sorted(self._reports.leaving)]
        enough = self.count - len(leaving) >= (self._least or 0)
        if not all(report.saves for report in leaving) or (enough and not is_early):
            self._without(set(), "; ".join(report.leaves for report in leaving))
        elif not is_early:
            if not self._saves:
                self._saves = True
                self._change()
            if len(self._reports.done) == self.count:
                self._decide(Decision(kind="done"))

    def _lost(self, now: float) -> dict[int, str]:
        """Return the launchers that count as lost at time `now`, each with the reason."""
        found = dict.fromkeys(
            _older(self._heard, now - LOST_SECONDS),
            f"no sign of its launcher for {LOST_SECONDS:.0f} s",
        )
        gone = _older(self._gone, now - _GONE_SECONDS)
        return found | dict.fromkeys(gone, "its launcher has ended, or cannot be reached")

    def _lose(self, lost: dict[int, str], now: float) -> None:
        index, why = min(lost.items())
        verdict = lost_verdict(self._membership.names[index], why)
        if self._least is not None:
            # Do not wait for launchers that have been silent for some seconds.
            silent = set(_older(self._heard, now - 2 * self._silent_seconds))
            self._without({*lost, *silent}, verdict.text.removeprefix("lockstep: "))
        else:
            self._decide(Decision(kind="end", verdict=verdict))

    def _without(self, leaving: set[int], text: str) -> None:
        leaving |= self._reports.leaving
        staying = tuple(index for index in range(self.count) if index not in leaving)
        self._decide(Decision(kind="round", text=text, staying=staying))


def _older(times: OrderedDict[int, float], than: float) -> Iterator[int]:
    """Yield the keys of `times`, a dictionary sorted by time, whose time is before `than`."""
    return (index for index, _ in takewhile(lambda item: item[1] < than, times.items()))
