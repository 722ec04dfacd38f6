"""The agent starts the workers of each generation, watches them and ends them; nothing else starts any."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    DEFAULT_ROLE,
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource

from lockstep.errors import LockstepError, RunError
from lockstep.launch import failure
from lockstep.launch.failure import Failure, Verdict
from lockstep.launch.forkserver import Exit, ForkServer, Request
from lockstep.launch.interrupts import Interrupted, Interrupts
from lockstep.launch.neighbours import Neighbours, Told
from lockstep.launch.output import Output
from lockstep.launch.plan import Meeting, Plan, WorkerPlan
from lockstep.launch.rendezvous import Rendezvous

#: Seconds between two looks at the workers.
_INTERVAL = 0.02
#: After a first failure, seconds in which others may tell of theirs before the rest is stopped.
_SETTLE = 0.3
#: The same while all that is known are consequences: the cause may be slower to end.
_SETTLE_CONSEQUENCE = 1.5
#: Seconds between SIGTERM and SIGKILL.
_GRACE = 5.0

Planner = Callable[[Meeting], Plan]
Judge = Callable[[list[Failure]], Verdict]


class Agent(SimpleElasticAgent):
    """An elastic agent whose workers come from the fork server.

    Args:
        planner: gives the plan of a generation, once it is known where its workers meet.
        judge: gives the verdict over failures.
        rendezvous: where the launchers meet.
        server: makes the workers.
        output: takes their output.
        interrupts: signals that the launcher received.
        deadline: moment of `time.monotonic` at which the launch is over; `None` for none.
    """

    def __init__(
        self,
        planner: Planner,
        judge: Judge,
        rendezvous: Rendezvous,
        *,
        server: ForkServer,
        output: Output,
        interrupts: Interrupts,
        deadline: float | None = None,
    ) -> None:
        roster = rendezvous.roster
        super().__init__(
            WorkerSpec(
                role="default",
                local_world_size=roster.ranks[roster.index],
                rdzv_handler=rendezvous,
                entrypoint="lockstep",
                max_restarts=0,
                monitor_interval=_INTERVAL,
            ),
            exit_barrier_timeout=30,
        )
        self._planner = planner
        self._judge = judge
        self._meeting_place = rendezvous
        self._neighbours: Neighbours | None = None
        self._server = server
        self._output = output
        self._interrupts = interrupts
        self._deadline = deadline
        self.plan: Plan | None = None
        self._started: set[int] = set()
        self._exits: dict[int, Exit] = {}
        #: What is said of the launch, if it failed.
        self.verdict: Verdict | None = None

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._check()
        self._exits.clear()
        self._started.clear()
        if self._meeting_place.roster.count > 1:
            self._neighbours = Neighbours(self._meeting_place.store, self._meeting_place.roster)
        self.plan = self._planner(self._meeting(worker_group))
        return {index: self._start(worker) for index, worker in enumerate(self._workers)}

    @property
    def _workers(self) -> tuple[WorkerPlan, ...]:
        return self.plan.workers if self.plan is not None else ()

    def _meeting(self, group: WorkerGroup) -> Meeting:
        restarts = group.spec.max_restarts
        return Meeting.of(
            self._meeting_place.roster,
            port=_known(group.master_port),
            generation=restarts - self._remaining_restarts,
            max_restarts=restarts,
            run_id=group.spec.rdzv_handler.get_run_id(),
        )

    def _start(self, worker: WorkerPlan) -> int:
        streams = self._output.open(worker.rank, worker.log)
        try:
            request = Request(rank=worker.rank, local_rank=worker.local_rank, env=worker.env)
            pid = self._server.start(request, *streams)
        finally:
            for descriptor in streams:
                os.close(descriptor)
        self._started.add(worker.rank)
        return pid

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        self._check()
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise TimeoutError
        self._look()
        if any(left.code != 0 for left in self._exits.values()):
            self._settle()
            self.verdict = self._agree(failure.collect(self._workers, self._exits))
            return RunResult(state=WorkerState.FAILED)
        if self._neighbours is not None and self._neighbours.problem is not None:
            self.verdict = self._neighbours.problem
            return RunResult(state=WorkerState.FAILED)
        if not self._running():
            done = {worker.rank: None for worker in self._workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=done)
        return RunResult(state=WorkerState.HEALTHY)

    def _agree(self, failures: list[Failure]) -> Verdict:
        """Return the verdict over this launcher's failures, or another's that explains them."""
        own, cause = self._judge(failures), failure.first(failures)
        if self._neighbours is None:
            return own
        self._neighbours.fail(Told(verdict=own, consequence=cause.consequence, time=cause.time))
        return self._await_verdict() or own

    def _await_verdict(self) -> Verdict | None:
        neighbours = self._neighbours
        assert neighbours is not None
        while neighbours.problem is None and not neighbours.all_done:
            if self._interrupts.impatient:
                return None
            time.sleep(_INTERVAL)
        return neighbours.problem

    def _exit_barrier(self) -> None:
        """Wait until all launchers are done: one of them hosts the store that the others' workers use."""
        if self._neighbours is None:
            return
        self._neighbours.done()
        while not self._neighbours.all_done:
            self._check()
            if self._neighbours.problem is not None:
                self.verdict = self._neighbours.problem
                return
            time.sleep(_INTERVAL)

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the workers to their end; tell the other launchers how it went."""
        try:
            result: RunResult = super().run(role)
        except Interrupted:
            if self._neighbours is not None:
                self._await_verdict()
            raise
        except LockstepError as error:
            self._tell(f"lockstep: error on {self._name}: {error.message}", error.exit_code)
            raise
        finally:
            if self._neighbours is not None:
                self._neighbours.close()
        return result

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Return the workers of this launcher; the roster knows their ranks, without asking the others."""
        roster = self._meeting_place.roster
        ranks = range(roster.first_rank, roster.first_rank + spec.local_world_size)
        return [
            Worker(
                local_rank=roster.first_local_rank + index,
                global_rank=rank,
                role_rank=rank,
                world_size=roster.size,
                role_world_size=roster.size,
            )
            for index, rank in enumerate(ranks)
        ]

    def _check(self) -> None:
        """Raise `Interrupted` if the launcher has been told to stop; tell the others first."""
        stop = self._interrupts.first
        if stop is not None:
            self._tell(f"lockstep: stopped by {stop.name} on {self._name}", 128 + stop)
        self._interrupts.check()

    @property
    def _name(self) -> str:
        return self._meeting_place.roster.names[self._meeting_place.roster.index]

    def _tell(self, text: str, exit_code: int) -> None:
        """Tell the other launchers, if there are any, what ends this one."""
        if self._neighbours is not None:
            verdict = Verdict(text=text, exit_code=exit_code, rank=-1, traceback=None)
            self._neighbours.fail(Told(verdict=verdict, consequence=False, time=time.time()))

    def _running(self) -> bool:
        return len(self._exits) < len(self._started)

    def _look(self) -> None:
        try:
            for left in self._server.poll():
                self._exits[left.rank] = left
        except RunError:
            self._await_signal()
            raise

    def _await_signal(self) -> None:
        """Whoever ends the fork server may mean the launcher too: Slurm signals all processes of a step."""
        deadline = time.monotonic() + _SETTLE
        while time.monotonic() < deadline:
            self._check()
            time.sleep(_INTERVAL)

    def _settle(self) -> None:
        """Give the others a moment to fail by themselves: the cause may be among them."""
        began = time.monotonic()
        while self._running():
            known = failure.collect(self._workers, self._exits)
            patience = _SETTLE_CONSEQUENCE if failure.first(known).consequence else _SETTLE
            if time.monotonic() - began > patience or self._interrupts.first:
                return
            time.sleep(_INTERVAL)
            self._look()

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self._shutdown()

    def _shutdown(
        self,
        death_sig: signal.Signals = signal.SIGTERM,
        timeout: int = 30,
    ) -> None:
        """Ask the workers' sessions to end, and make them after a grace."""
        if not self._wait_after(death_sig, _GRACE):
            self._wait_after(signal.SIGKILL, _GRACE)

    def _wait_after(self, signum: signal.Signals, seconds: float) -> bool:
        """Send `signum`; return whether all workers ended within `seconds`."""
        if self._running():
            self._server.signal(signum)
        deadline = time.monotonic() + seconds
        while self._running():
            hurry = self._interrupts.impatient and signum != signal.SIGKILL
            if hurry or time.monotonic() > deadline:
                return False
            time.sleep(_INTERVAL / 2)
            self._look()
        return True

    def _construct_event(  # type: ignore[no-untyped-def]
        self, state: str, source: EventSource, *_args, **_kwargs
    ) -> Event:
        # The base class asks the resolver for this host's full name: seconds where there is no network.
        return Event(f"torchelastic.worker.status.{state}", source=source)

    def _record_worker_events(self, result: RunResult) -> None:
        """Record nothing: the verdict tells what happened, and torch's event needs its own files."""


def _known(value: Any) -> Any:
    """Return a field of the worker group: typed as empty, and filled by the rendezvous."""
    if value is None:
        raise AssertionError("workers start after their rendezvous")
    return value
