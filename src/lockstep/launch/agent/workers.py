"""`Workers`: start worker processes through the fork server, record their exits, and stop them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping

from lockstep.errors import RunError
from lockstep.launch import stdin
from lockstep.launch.agent.forkserver import Exit, ForkRequest, ForkServer
from lockstep.launch.agent.interrupts import Interrupts
from lockstep.launch.output import Output, say
from lockstep.launch.plan import Plan, WorkerPlan
from lockstep.world.environments.lockstep import END_SERVER

_INTERVAL = 0.01
#: Seconds that the kernel may take to end a process: one may be in the middle of a long write.
LAST_GRACE = 30.0


class Workers:
    """The worker and parameter-server processes of one launcher, until the next restart.

    Args:
        lost: function to call if the fork server has ended, before an error about it is raised.

    Attributes:
        started: process ids of all processes started since the last restart, by rank.
        exits: exits of the processes that have ended, by rank.
    """

    def __init__(
        self,
        server: ForkServer,
        output: Output,
        interrupts: Interrupts,
        lost: Callable[[], None],
    ) -> None:
        self._server, self._output = server, output
        self._interrupts, self._lost = interrupts, lost
        self._names: dict[int, str] = {}
        self.started: dict[int, int] = {}
        self.exits: dict[int, Exit] = {}

    def begin(self) -> None:
        """Prepare the next start of workers: forget the earlier processes, all of which have ended."""
        self.exits.clear()
        self.started.clear()

    def start(self, plan: Plan, worker: WorkerPlan, more: Mapping[str, str]) -> None:
        """Start one worker or parameter server of `plan`; `more` are additional environment variables."""
        shown = plan.spec.streams.prefixes(worker.rank, worker.local_rank, worker.name)
        streams = (
            stdin.descriptor(worker.rank, plan.size, plan.spec.kind),
            *self._output.open(worker.log, shown),
        )
        try:
            env = {**worker.env, **more}
            request = ForkRequest(rank=worker.rank, local_rank=worker.local_rank, env=env)
            self.started[worker.rank] = self._server.start(request, streams)
        finally:
            for descriptor in streams:
                os.close(descriptor)
        self._names[worker.rank] = worker.name

    def look(self) -> None:
        """Record the exits of processes that have ended since the last call."""
        try:
            for left in self._server.poll():
                if self.started.get(left.rank) == left.pid:
                    self.exits[left.rank] = left
        except RunError:
            self._lost()
            raise

    @property
    def living(self) -> dict[int, int]:
        """Process ids of the processes that have not ended, by rank."""
        return {rank: pid for rank, pid in self.started.items() if rank not in self.exits}

    def end(self, signum: signal.Signals, seconds: float) -> bool:
        """Send `signum` to all processes; return whether all have ended within `seconds`."""
        if living := self.living:
            self._server.signal(signum)
            self._server.signal(END_SERVER, only=[pid for rank, pid in living.items() if rank < 0])
        deadline = time.monotonic() + seconds
        while self.living:
            is_cut_short = self._interrupts.is_repeated and signum != signal.SIGKILL
            if is_cut_short or time.monotonic() > deadline:
                return False
            self._server.wait(_INTERVAL)
            self.look()
        return True

    def kill(self) -> None:
        """Send SIGKILL to all processes and wait until the last has ended.

        The kernel ends a process that is inside a system call, such as a write to a file server that does
        not answer, when the call returns. Until then the process may change memory and files that workers
        read after a restart.

        Raises:
            Interrupted: if the launcher gets a second signal during the wait.
        """
        is_named = False
        while not self.end(signal.SIGKILL, LAST_GRACE):
            if self._interrupts.is_repeated:
                self._interrupts.check()
            if not is_named:
                self.name_living(LAST_GRACE, "the next generation starts when they have ended")
                is_named = True

    def forget_living(self) -> None:
        """Drop the processes that have not ended, so that no call waits for them."""
        self.started = {rank: pid for rank, pid in self.started.items() if rank in self.exits}

    def name_living(self, seconds: float, then: str) -> None:
        """Print the names of processes that SIGKILL did not end within `seconds`, followed by `then`."""
        names = [f"{self._names[rank]} (process {pid})" for rank, pid in self.living.items()]
        say(f"lockstep: SIGKILL has not ended {', '.join(names)} within {seconds:.0f} s; {then}")
