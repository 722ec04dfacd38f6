"""The agent starts the workers of each generation, watches them and ends them; nothing else starts any."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.events.api import Event, EventSource

from lockstep.launch import failure
from lockstep.launch.failure import Failure
from lockstep.launch.forkserver import Exit, ForkServer, Request
from lockstep.launch.interrupts import Interrupts
from lockstep.launch.output import Output
from lockstep.launch.plan import Meeting, Plan, WorkerPlan
from lockstep.launch.rendezvous import LoopbackRendezvous

#: Seconds between two looks at the workers.
_INTERVAL = 0.02
#: After a first failure, seconds in which others may tell of theirs before the rest is stopped.
_SETTLE = 0.3
#: The same while all that is known are consequences: the cause may be slower to end.
_SETTLE_CONSEQUENCE = 1.5
#: Seconds between SIGTERM and SIGKILL.
_GRACE = 5.0

Planner = Callable[[Meeting], Plan]


class Agent(SimpleElasticAgent):
    """An elastic agent whose workers come from the fork server.

    Args:
        planner: gives the plan of a generation, once it is known where its workers meet.
        size: number of workers on this node.
        run_id: name of the launch.
        server: makes the workers.
        output: takes their output.
        interrupts: signals that the launcher received.
        deadline: moment of `time.monotonic` at which the launch is over; `None` for none.
    """

    def __init__(
        self,
        planner: Planner,
        *,
        size: int,
        run_id: str,
        server: ForkServer,
        output: Output,
        interrupts: Interrupts,
        deadline: float | None = None,
    ) -> None:
        rendezvous = LoopbackRendezvous(run_id)
        super().__init__(
            WorkerSpec(
                role="default",
                local_world_size=size,
                rdzv_handler=rendezvous,
                entrypoint="lockstep",
                max_restarts=0,
                monitor_interval=_INTERVAL,
            ),
            exit_barrier_timeout=30,
        )
        self._planner = planner
        self._rendezvous_handler = rendezvous
        self._server = server
        self._output = output
        self._interrupts = interrupts
        self._deadline = deadline
        self.plan: Plan | None = None
        self._started: set[int] = set()
        self._exits: dict[int, Exit] = {}
        self.failures: list[Failure] = []

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._interrupts.check()
        self._exits.clear()
        self._started.clear()
        self.plan = self._planner(self._meeting(worker_group))
        return {worker.local_rank: self._start(worker) for worker in self._workers}

    @property
    def _workers(self) -> tuple[WorkerPlan, ...]:
        return self.plan.workers if self.plan is not None else ()

    def _meeting(self, group: WorkerGroup) -> Meeting:
        restarts = group.spec.max_restarts
        return Meeting(
            address=_known(group.master_addr),
            port=_known(group.master_port),
            generation=restarts - self._remaining_restarts,
            max_restarts=restarts,
            node_rank=_known(group.group_rank),
            node_count=_known(group.group_world_size),
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
        self._interrupts.check()
        if self._deadline is not None and time.monotonic() > self._deadline:
            raise TimeoutError
        self._look()
        if any(left.code != 0 for left in self._exits.values()):
            self._settle()
            self.failures = failure.collect(self._workers, self._exits)
            return RunResult(state=WorkerState.FAILED)
        if not self._running():
            done = {worker.rank: None for worker in self._workers}
            return RunResult(state=WorkerState.SUCCEEDED, return_values=done)
        return RunResult(state=WorkerState.HEALTHY)

    def _running(self) -> bool:
        return len(self._exits) < len(self._started)

    def _look(self) -> None:
        for left in self._server.poll():
            self._exits[left.rank] = left

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
