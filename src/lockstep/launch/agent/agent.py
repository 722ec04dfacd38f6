"""`Agent`: the part of the launcher that starts, monitors, restarts and stops the workers of one node."""

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
from lockstep.launch.agent.failure import (
    Decision,
    Failure,
    FailureReport,
    Kind,
    MemoryKills,
    Verdict,
    preempted,
)
from lockstep.launch.agent.forkserver import LAST_GRACE, Exit, ForkServer, Workers
from lockstep.launch.agent.hang import HangWatch
from lockstep.launch.agent.interrupts import Interrupted, Interrupts
from lockstep.launch.agent.restarts import GenerationRendezvous, RankProgress, Restarts
from lockstep.launch.nodes.client import CoordinatorClient, RoundOverError
from lockstep.launch.output import Output, say
from lockstep.launch.plan import Generation, Plan, WorkerPlan
from lockstep.settings import TABLE
from lockstep.state.record import events

#: Seconds between two polls of the workers.
_INTERVAL = 0.02
#: Seconds after the first failure in which other workers may fail too, before all are stopped.
_SETTLE = 0.3
#: Seconds for the same wait if all known failures follow from another rank's, whose process may end later.
_SETTLE_CONSEQUENCE = 1.5

Planner = Callable[[Generation], Plan]


class _State(enum.Enum):
    """State of this launcher's workers: running, to be restarted, failed, or done."""

    RUNNING = enum.auto()
    #: The workers are to be stopped and started again.
    RESTART = enum.auto()
    FAILED = enum.auto()
    DONE = enum.auto()


class Agent:
    """Runs the workers of one node through a fork server, and starts them again after failures.

    A generation is the set of worker processes between two restarts.

    Args:
        planner: function that takes a `Generation` and returns the `Plan` of its workers: commands,
            environment variables, log files. It is called at each start, after the rendezvous.
        deadline: `time.monotonic` value at which the launch times out; `None` for no limit.
    """

    def __init__(
        self,
        planner: Planner,
        rendezvous: GenerationRendezvous,
        *,
        server: ForkServer,
        output: Output,
        interrupts: Interrupts,
        progress: RankProgress,
        hangs: HangWatch,
        restarts: Restarts,
        deadline: float | None = None,
    ) -> None:
        self._planner = planner
        self._kills = MemoryKills()
        self._rendezvous = rendezvous
        self._server = server
        self._processes = Workers(server, output, interrupts, self._await_signal)
        self._interrupts = interrupts
        self._deadline = deadline
        self.plan: Plan | None = None
        self._progress = progress
        self._hangs = hangs
        self._restarts = restarts
        self._leaving = False
        self._preempted: set[int] = set()  # process ids of ranks that have been sent SIGTERM
        #: Message about the failure or preemption of the launch; `None` after success.
        self.verdict: Verdict | None = None

    def run(self) -> None:
        """Run the workers until they end, with restarts; report the result to the other launchers."""
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
            self._leave(f"lockstep: error on {self._name}: {error.message}", error.exit_code)
            raise
        finally:
            self._rendezvous.finish()
            self._record("end", exit_code=self._exit_code(sys.exception()))

    def _run_generations(self) -> None:
        self._start_workers()
        while (state := self._look()) is not _State.DONE:
            if state is _State.RESTART:
                # SIGKILL at once: the state is in the snapshot, and a restart should be fast.
                self._processes.kill()
                self._start_workers()
            elif state is _State.FAILED:
                if self._progress.opened:
                    # No SIGTERM: a run would save its state, for which ranks are missing.
                    self._processes.end(signal.SIGKILL, LAST_GRACE)
                return

    def _start_workers(self) -> None:
        generation = self._rendezvous.next_generation(self._check)
        self._check()
        self._processes.begin()
        self._progress.begin()
        self.plan = self._planner(generation)
        if generation.number:
            self._record("restart", generation=generation.number)
        for server in self.plan.servers:
            self._processes.start(self.plan, server, {})
        variables = self._progress.variables
        for index, worker in enumerate(self.plan.workers):
            self._processes.start(self.plan, worker, variables(index, len(self.plan.workers)))

    @property
    def _coordinator(self) -> CoordinatorClient | None:
        return self._rendezvous.coordinator

    @property
    def _workers(self) -> tuple[WorkerPlan, ...]:
        return self.plan.workers if self.plan is not None else ()

    @property
    def _servers(self) -> tuple[WorkerPlan, ...]:
        return self.plan.servers if self.plan is not None else ()

    @property
    def _name(self) -> str:
        return self._rendezvous.membership.names[self._rendezvous.membership.index]

    # --- state of the workers ----------------------------------------------------------------

    def _look(self) -> _State:
        """Poll workers, hang detector and coordinator; return the new state of the workers.

        Raises:
            TimeoutError: if the deadline of the launch has passed.
        """
        self._server.wait(_INTERVAL)
        self._check()
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise TimeoutError
        self._processes.look()
        if self._failed():
            self._settle()
            # A rank that the passed-on SIGTERM ended had no run to save: end the launch.
            exits = self._processes.exits.values()
            if any(e.pid in self._preempted and e.code == -signal.SIGTERM for e in exits):
                self._stop()
            return self._report(self._failure())
        size, living = self._rendezvous.membership.size, self._processes.living
        hang = self._hangs.look(self._workers, living, size, self._servers)
        if hang is not None:
            state = self._report(hang)
            self._processes.kill()  # workers that hang cannot report anything
            return state
        if self._coordinator is not None and self._coordinator.decision is not None:
            return self._apply(self._coordinator.decision)
        if self._training():
            return _State.RUNNING
        if self._coordinator is None:
            return self._succeed()
        # Wait until all launchers are done: launcher 0 hosts the store that all workers use.
        self._coordinator.done()
        return _State.RUNNING

    def _training(self) -> bool:
        """Whether any worker runs; parameter servers don't count, as they end after the workers."""
        return any(worker.rank not in self._processes.exits for worker in self._workers)

    def _failed(self) -> dict[int, Exit]:
        """Return the exits of failed workers, by rank.

        Exit code 75, of a preempted run that has saved its state, does not count as a failure.
        """
        fine = {0, PREEMPTED} if self._progress.opened else {0}
        return {rank: e for rank, e in self._processes.exits.items() if e.code not in fine}

    def _failures(self) -> list[Failure]:
        found = failure.collect((*self._workers, *self._servers), self._failed())
        if found and all(one.consequence for one in found):
            # A rank may have exited with code 0 inside its run, while the other ranks waited for it.
            inside = [w for index, w in enumerate(self._workers) if self._progress.is_inside(index)]
            exits = self._processes.exits
            ended = {w.rank: exits[w.rank] for w in inside if w.rank in exits}
            left = {rank: e for rank, e in ended.items() if e.code == 0}
            return found + failure.collect(self._workers, left)
        return found

    def _settle(self) -> None:
        """Wait a moment after the first failure of a worker, since more workers may fail.

        A later failure may be the cause of the first one. The wait is 0.3 s; it is 1.5 s as long as each
        known failure follows from another rank's.
        """
        began = time.monotonic()
        while self._training():
            cause = failure.first(self._failures())
            if cause.report is None and cause.exit is not None and cause.exit.code < 0:
                return  # a rank killed by a signal is a cause: no wait is needed
            patience = _SETTLE_CONSEQUENCE if cause.consequence else _SETTLE
            if time.monotonic() - began > patience or self._interrupts.first:
                return
            self._server.wait(_INTERVAL)
            self._processes.look()

    # --- decisions ---------------------------------------------------------------------------

    def _failure(self) -> FailureReport:
        """Return a report of the failure that likely caused the others of this launcher.

        The report is for the coordinator on launcher 0.
        """
        failures, size = self._failures(), self._rendezvous.membership.size
        cause = failure.first(failures)
        return FailureReport(
            verdict=failure.verdict(failures, size, killed_for_memory=self._kills.grew()),
            consequence=cause.consequence,
            time=failure.wall(cause.time),
        )

    def _report(self, report: FailureReport) -> _State:
        """Obtain a decision on a failure, carry it out, and return the workers' next state.

        Launcher 0 decides; if this launcher is the only one, its own restart policy does.
        """
        verdict, number = report.verdict, self._rendezvous.generation
        self._record("failure", generation=number, name=verdict.name, text=verdict.brief)
        decision: Decision | None = None
        if self._coordinator is not None:
            self._coordinator.fail(report)
            decision = self._await_decision()
        elif (text := self._restarts.decide(verdict)) is not None:
            decision = Decision(kind="restart", text=text)
            if verdict.wrong is not None:
                self._rendezvous.leave_out(verdict.wrong)
        return self._apply(decision or Decision(kind="end", verdict=verdict))

    def _await_decision(self) -> Decision | None:
        assert self._coordinator is not None
        while (decision := self._coordinator.decision) is None:
            if self._interrupts.is_repeated:
                return None
            time.sleep(_INTERVAL)
        return decision

    def _apply(self, decision: Decision) -> _State:
        """Apply a decision: print its message, and return the workers' next state."""
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
            self._restarts.count_restart()
        return _State.RESTART

    def _succeed(self) -> _State:
        if any(left.code == PREEMPTED for left in self._processes.exits.values()):
            assert self.plan is not None, "workers have exited"
            run_dir = Path(self._workers[0].env["LOCKSTEP_RUN_DIR"])
            self.verdict = preempted(self._progress.step, run_dir, self.plan.spec.command)
        return _State.DONE

    def _exit_code(self, error: BaseException | None) -> int:
        """Return the exit code of the launcher.

        `error` is the exception that ended `Agent.run`; `None` if `Agent.run` returned.
        """
        if isinstance(error, Interrupted):
            return 128 + error.signum
        if error is not None:
            return error.exit_code if isinstance(error, LockstepError) else 1
        return self.verdict.exit_code if self.verdict else 0

    def _record(self, kind: str, **fields: Any) -> None:
        """Append an event of type `kind` with `fields` to this launcher's event file.

        The file is in the run directory. Disk errors are ignored, since the ranks report them.
        """
        if self.plan is None or not self._restarts.is_run:
            return
        run_dir = Path(self._workers[0].env["LOCKSTEP_RUN_DIR"])
        name = f"launcher-{self._rendezvous.membership.index}"
        with contextlib.suppress(RunDirectoryError):
            events.append(run_dir, name, kind=kind, **fields)

    # --- signals -----------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise `Interrupted` if the launcher got a signal, after telling the other launchers.

        A signal that preempts a run raises nothing: the ranks get SIGTERM, save the run and exit.
        """
        coordinator = self._coordinator
        if coordinator is not None and coordinator.saves:
            self._preempt_ranks()
        if not (self._interrupts.is_preemption and self._progress.opened):
            self._stop()
        elif coordinator is not None and self._rendezvous.may_leave:
            coordinator.leave(f"stopped on {self._name}", saves=True)
        else:
            self._preempt_ranks()

    def _preempt_ranks(self) -> None:
        """Send SIGTERM to the ranks inside `lockstep.Run`: each saves the run's state and exits."""
        ranks = self._progress.pids - self._preempted
        if ranks:
            self._server.signal(signal.SIGTERM, only=ranks)
            self._preempted |= ranks

    def _stop(self) -> None:
        stop = self._interrupts.first
        if stop is not None:
            self._leave(f"lockstep: stopped by {stop.name} on {self._name}", 128 + stop)
        self._interrupts.check()

    def _leave(self, text: str, exit_code: int) -> None:
        """Report to the other launchers that this launcher ends, for the reason `text`.

        An elastic launch continues without this launcher; any other launch fails with `exit_code`.
        """
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

    def _await_signal(self) -> None:
        """Wait 0.3 s for a signal, after the fork server has ended.

        A scheduler or user that kills all processes of a job may end the fork server first.

        Raises:
            Interrupted: if a signal arrives.
        """
        deadline = time.monotonic() + _SETTLE
        while time.monotonic() < deadline:
            self._check()
            time.sleep(_INTERVAL)

    # --- the end of workers ------------------------------------------------------------------

    def _shutdown(self) -> None:
        """Send SIGTERM to all workers, and SIGKILL to those that have not ended after a timeout.

        If a signal that is passed on to the workers ended the launcher, they get that signal, not SIGTERM.
        """
        if self.plan is None:
            return
        signum, spec = signal.SIGTERM, self.plan.spec
        if self._interrupts.first in spec.signals_passed_on:
            signum = self._interrupts.first
        grace = spec.settings.value_or_default("shutdown_timeout", os.environ)
        # If this launcher leaves, do not keep the others waiting: they have the state of its workers.
        if not self._leaving and self._processes.end(signum, grace, self._progress.pids):
            return
        seconds = TABLE["shutdown_timeout"].default
        if not self._processes.end(signal.SIGKILL, seconds):
            # Do not wait for a process that hangs in a driver.
            self._processes.name_living(seconds, "the system ends them when it can")
            self._processes.forget_living()
