"""`Agent`: starts, watches and ends the workers of each generation."""

from __future__ import annotations

import contextlib
import enum
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.errors import PREEMPTED, LockstepError, RunDirectoryError
from lockstep.launch.agent import failure
from lockstep.launch.agent.failure import Failure, MemoryKills, Verdict, preempted
from lockstep.launch.agent.forkserver import Exit, ForkServer
from lockstep.launch.agent.hang import HangWatch
from lockstep.launch.agent.interrupts import Interrupted, Interrupts
from lockstep.launch.agent.rank_progress import RankProgress
from lockstep.launch.agent.rendezvous import Rendezvous
from lockstep.launch.agent.restarts import Kind, Restarts
from lockstep.launch.agent.workers import LAST_GRACE, Workers
from lockstep.launch.fault_tolerance import FaultTolerance
from lockstep.launch.nodes.client import CoordinatorClient, RoundOverError
from lockstep.launch.nodes.messages import Decision, FailureReport
from lockstep.launch.output import Output, say
from lockstep.launch.plan import Generation, Plan, WorkerPlan
from lockstep.settings import TABLE
from lockstep.state.record import events

#: Seconds between two looks at the workers while nothing happens to them.
_INTERVAL = 0.02
#: After a first failure, seconds in which others may tell of theirs before the rest is stopped.
_SETTLE = 0.3
#: The same while all that is known are consequences: the cause may be slower to end.
_SETTLE_CONSEQUENCE = 1.5

Planner = Callable[[Generation], Plan]


class _State(enum.Enum):
    """How the workers of a generation are."""

    RUNNING = enum.auto()
    #: They end, and another generation begins.
    RESTART = enum.auto()
    FAILED = enum.auto()
    DONE = enum.auto()


class Agent:
    """Runs generation after generation of workers, which come from the fork server.

    Args:
        planner: gives the plan of a generation, once the rendezvous of its workers is known.
        rendezvous: of the launchers.
        server: makes the workers.
        output: takes their output.
        interrupts: signals that the launcher received.
        progress: where the ranks of this launcher are.
        hangs: looks whether they move.
        restarts: says which failures are followed by a new generation.
        is_run: whether the script is known to use Lockstep before it has opened a run.
        deadline: moment of `time.monotonic` at which the launch is over; `None` for none.
    """

    def __init__(
        self,
        planner: Planner,
        rendezvous: Rendezvous,
        *,
        server: ForkServer,
        output: Output,
        interrupts: Interrupts,
        progress: RankProgress,
        hangs: HangWatch,
        restarts: Restarts,
        is_run: bool = False,
        deadline: float | None = None,
    ) -> None:
        self._planner = planner
        self._kills = MemoryKills()
        self._rendezvous = rendezvous
        rendezvous.policy, rendezvous.check = self._again, self._check
        self._server = server
        self._processes = Workers(server, output, interrupts, self._await_signal)
        self._interrupts = interrupts
        self._deadline = deadline
        self.plan: Plan | None = None
        self._progress = progress
        self._hangs = hangs
        self._restarts = restarts
        self._is_run = is_run
        self._leaving = False
        self._preempted: set[int] = set()  # process ids of ranks that were told
        #: What is said of the launch, if it did not end well.
        self.verdict: Verdict | None = None

    def run(self) -> None:
        """Run the workers to their end; tell the other launchers how it went."""
        try:
            try:
                self._run_generations()
            finally:
                self._shutdown()
        except RoundOverError as over:
            self.verdict = over.decision.verdict
        except Interrupted:
            if self._coordinator is not None:
                self._await_decision()
            raise
        except LockstepError as error:
            self._part(f"lockstep: error on {self._name}: {error.message}", error.exit_code)
            raise
        finally:
            self._rendezvous.finish()
            self._record("end", exit_code=self._exit_code(sys.exception()))

    def _run_generations(self) -> None:
        self._start_workers()
        while (state := self._look()) is not _State.DONE:
            if state is _State.RESTART:
                # Without grace: what they hold is in the snapshot, and time is what a restart costs.
                self._processes.kill()
                self._stop_workers()
                self._start_workers()
            elif state is _State.FAILED:
                self._stop_workers()
                return

    def _start_workers(self) -> None:
        generation = self._rendezvous.next_generation()
        self._check()
        self._processes.begin()
        self._progress.begin()
        self.plan = self._planner(generation)
        if self._generation:
            self._record("restart", generation=self._generation)
        for server in self._servers:
            self._processes.start(self.plan, server, {})
        for index, worker in enumerate(self._workers):
            self._processes.start(self.plan, worker, self._progress.variables(index))

    @property
    def _coordinator(self) -> CoordinatorClient | None:
        return self._rendezvous.coordinator

    @property
    def _workers(self) -> tuple[WorkerPlan, ...]:
        return self.plan.workers if self.plan is not None else ()

    @property
    def _servers(self) -> tuple[WorkerPlan, ...]:
        return self.plan.servers if self.plan is not None else ()

    def _look(self) -> _State:
        """Wait for news of the workers, a moment at most; return how they are."""
        self._server.wait(_INTERVAL)
        self._check()
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise TimeoutError
        self._processes.look()
        if self._failed():
            self._settle()
            self._check_gone()
            return self._report(self._told(self._failures()))
        if (hang := self._hang()) is not None:
            state = self._report(hang)
            self._processes.kill()  # a worker that hangs has nothing to report
            return state
        if self._coordinator is not None and self._coordinator.decision is not None:
            return self._follow(self._coordinator.decision)
        return _State.RUNNING if self._training() else self._finish()

    def _finish(self) -> _State:
        """Wait until all launchers are done: one of them hosts the store that the others' workers use."""
        if self._coordinator is not None:
            self._coordinator.done()
            return _State.RUNNING
        return self._succeed()

    def _succeed(self) -> _State:
        self.verdict = self._preemption()
        return _State.DONE

    def _failed(self) -> dict[int, Exit]:
        """Return the workers that ended badly; to save and leave is no failure of a run."""
        fine = {0, PREEMPTED} if self._progress.opened else {0}
        return {rank: left for rank, left in self._processes.exits.items() if left.code not in fine}

    def _failures(self) -> list[Failure]:
        found = failure.collect((*self._workers, *self._servers), self._failed())
        if found and all(one.consequence for one in found):
            return found + failure.collect(self._workers, self._left())
        return found

    def _left(self) -> dict[int, Exit]:
        """Return the workers that ended inside a run with exit code 0: others may have waited for them."""
        return {
            worker.rank: left
            for index, worker in enumerate(self._workers)
            if (left := self._processes.exits.get(worker.rank)) is not None
            and left.code == 0
            and self._progress.is_inside(index)
        }

    def _report(self, told: FailureReport) -> _State:
        """Do what is decided on a failure of this launcher's workers, or of all that it knows."""
        verdict = told.verdict
        self._record("failure", generation=self._generation, name=verdict.name, text=verdict.brief)
        if self._coordinator is None:
            line = self._again(told.verdict)
            own = Decision(kind="end", verdict=told.verdict)
            return self._follow(own if line is None else Decision(kind="restart", text=line))
        self._coordinator.fail(told)
        found = self._await_decision()
        return self._follow(found or Decision(kind="end", verdict=told.verdict))

    def _again(self, verdict: Verdict) -> str | None:
        """Return what the user is told if workers start again after a failure; `None` if they don't."""
        progress = self._progress.progress
        is_run = self._is_run or self._progress.opened
        if not self._restarts.again(verdict.kind, progress, is_run=is_run):
            return None
        return f"{verdict.brief}; restart {self._restarts.count}{self._progress.origin}"

    def _follow(self, decision: Decision) -> _State:
        """Do what is decided for all launchers."""
        if decision.kind == "round" and self._interrupts.first is not None:
            self._leaving = True
            self._interrupts.check()
        if decision.kind == "done":
            return self._succeed()
        if decision.kind == "end":
            self.verdict = decision.verdict
            return _State.FAILED
        if self._rendezvous.membership.speaks and decision.text:
            say(f"lockstep: {decision.text}")
        if decision.kind == "restart" and self._rendezvous.membership.index > 0:
            self._restarts.follow(self._progress.progress)
        return _State.RESTART

    def _preemption(self) -> Verdict | None:
        """Return what is said of a run whose ranks have saved it and left."""
        if all(left.code != PREEMPTED for left in self._processes.exits.values()):
            return None
        assert self.plan is not None, "workers have exited"
        run_dir = Path(self._workers[0].env["LOCKSTEP_RUN_DIR"])
        return preempted(self._progress.step, run_dir, self.plan.spec.command)

    def _told(self, failures: list[Failure]) -> FailureReport:
        """Return what the others are told of this launcher's failures."""
        cause, size = failure.first(failures), self._rendezvous.membership.size
        return FailureReport(
            verdict=failure.verdict(failures, size, killed_for_memory=self._kills.grew()),
            consequence=cause.consequence,
            time=failure.wall(cause.time),
        )

    def _hang(self) -> FailureReport | None:
        """Return what is told if no rank moves any more."""
        size = self._rendezvous.membership.size
        hang = self._hangs.look(self._workers, self._processes.living, size, self._servers)
        if hang is None:
            return None
        # Another launcher may know of a failure, or of a rank that is further behind.
        return FailureReport(verdict=hang.verdict, consequence=True, time=hang.progress)

    def _await_decision(self) -> Decision | None:
        assert self._coordinator is not None
        while (decision := self._coordinator.decision) is None:
            if self._interrupts.impatient:
                return None
            time.sleep(_INTERVAL)
        return decision

    def _exit_code(self, error: BaseException | None) -> int:
        """Return what the launcher ends with."""
        if isinstance(error, Interrupted):
            return 128 + error.signum
        if error is not None:
            return error.exit_code if isinstance(error, LockstepError) else 1
        return self.verdict.exit_code if self.verdict else 0

    @property
    def _generation(self) -> int:
        return self._rendezvous.generation

    def _record(self, kind: str, **fields: Any) -> None:
        """Write down what happened to a run; where the disk fails, the ranks are those to say so."""
        if self.plan is None or not (self._is_run or self._progress.opened):
            return
        run_dir = Path(self._workers[0].env["LOCKSTEP_RUN_DIR"])
        name = f"launcher-{self._rendezvous.membership.index}"
        with contextlib.suppress(RunDirectoryError):
            events.append(run_dir, name, kind=kind, **fields)

    def _check(self) -> None:
        """Raise `Interrupted` if the launcher has been told to stop; tell the others first.

        A run that is asked for room gets the time to save itself, or the ranks that have opened it do.
        """
        if self._coordinator is not None and self._coordinator.saves:
            self._ask_for_room()
        if self._interrupts.asks_for_room and self._progress.opened:
            if self._coordinator is not None and self._rendezvous.may_leave:
                self._coordinator.leave(f"stopped on {self._name}", saves=True)
            else:
                self._ask_for_room()
            return
        self._stop()

    def _check_gone(self) -> None:
        """Stop if a rank ended by the signal that was passed on: its run was over, and none to save."""
        told = [left for left in self._processes.exits.values() if left.pid in self._preempted]
        if any(left.code == -signal.SIGTERM for left in told):
            self._stop()

    def _stop(self) -> None:
        stop = self._interrupts.first
        if stop is not None:
            self._part(f"lockstep: stopped by {stop.name} on {self._name}", 128 + stop)
        self._interrupts.check()

    def _ask_for_room(self) -> None:
        news = self._progress.pids - self._preempted
        if news:
            self._server.signal(signal.SIGTERM, only=news)
            self._preempted |= news

    @property
    def _name(self) -> str:
        return self._rendezvous.membership.names[self._rendezvous.membership.index]

    def _part(self, text: str, exit_code: int) -> None:
        """Tell the other launchers, if there are any, what ends this one; some can continue without it."""
        if self._coordinator is None:
            return
        if self._rendezvous.may_leave:
            self._leaving = True
            self._coordinator.leave(text.removeprefix("lockstep: "))
            return
        verdict = Verdict(
            text=text, exit_code=exit_code, name=None, traceback=None, kind=Kind.REFUSED
        )
        self._coordinator.fail(FailureReport(verdict=verdict, consequence=False, time=time.time()))

    def _training(self) -> bool:
        """Whether any worker runs: servers end when they are told that all workers have."""
        return any(worker.rank not in self._processes.exits for worker in self._workers)

    def _await_signal(self) -> None:
        """Whoever ends the fork server may mean the launcher too: Slurm signals all processes of a step."""
        deadline = time.monotonic() + _SETTLE
        while time.monotonic() < deadline:
            self._check()
            time.sleep(_INTERVAL)

    def _settle(self) -> None:
        """Give the others a moment to fail by themselves: the cause may be among them."""
        began = time.monotonic()
        while self._training():
            cause = failure.first(self._failures())
            if cause.report is None and cause.exit is not None and cause.exit.code < 0:
                return  # a signal follows from no other rank's failure
            patience = _SETTLE_CONSEQUENCE if cause.consequence else _SETTLE
            if time.monotonic() - began > patience or self._interrupts.first:
                return
            self._server.wait(_INTERVAL)
            self._processes.look()

    def _stop_workers(self) -> None:
        if self._progress.opened:
            # SIGTERM asks a run to save itself, and ranks to agree when: some of them are gone.
            self._processes.end(signal.SIGKILL, LAST_GRACE)
        self._shutdown()

    def _shutdown(self) -> None:
        """Ask the workers' sessions to end, and make them after a grace."""
        death_sig = signal.SIGTERM
        # A launcher that leaves keeps the others waiting, although they have all the state of its workers.
        fault_tolerance = FaultTolerance() if self.plan is None else self.plan.spec.fault_tolerance
        if self._interrupts.first in fault_tolerance.passed_on:
            death_sig = self._interrupts.first
        if self._leaving or not self._processes.end(death_sig, fault_tolerance.grace(os.environ)):
            self._kill_last()

    def _kill_last(self) -> None:
        """Kill the workers at the end of the launch; one that hangs in a driver does not keep it."""
        seconds = TABLE["shutdown_timeout"].default
        if not self._processes.end(signal.SIGKILL, seconds):
            self._processes.name_living(seconds, "the system ends them when it can")
            self._processes.forget_living()
