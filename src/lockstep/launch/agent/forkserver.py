"""`ForkServer`: single-threaded child of the launcher that forks workers; `Workers`: the forked processes.

The server is forked before the launcher starts any thread or store, so that its own forks never copy a
locked lock of another thread. Launcher and server exchange small JSON messages over one socket. The server
kills the workers and exits when the launcher closes the socket or dies.

    launcher ── socket ── server ── fork ── worker (session of its own)
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from lockstep.errors import RunError
from lockstep.launch import stdin
from lockstep.launch.agent import processes
from lockstep.launch.agent.interrupts import Interrupts
from lockstep.launch.devices.binding import PROCESSORS
from lockstep.launch.output import Output, say
from lockstep.launch.plan import Plan, WorkerPlan
from lockstep.world.environments.torchrun import END_SERVER

#: Upper bound of one message in bytes.
_MESSAGE = 1 << 17
#: Seconds that killed workers have to end when the server ends.
_KILL_SECONDS = 5.0
#: Seconds between two polls: of a server that imports packages, and of workers that are to end.
_CHECK_SECONDS, _INTERVAL = 0.1, 0.01
#: Seconds that the kernel may take to end a process: one may be in the middle of a long write.
LAST_GRACE = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """Request to the fork server to start one worker with a rank and environment variables."""

    rank: int
    local_rank: int
    env: Mapping[str, str] = field(repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """Record of one worker process that has ended: rank, process id, exit code and time."""

    rank: int
    pid: int
    code: int  # exit code, or minus the signal that killed the process
    time: float  # moment of the exit, by `time.monotonic`


#: Function that runs in a freshly forked worker process and never returns.
Job = Callable[[ForkRequest], NoReturn]
#: Function that imports packages in the server; returns the name of one that makes forks unsafe.
Preload = Callable[[], str | None]


class ForkServer:
    """The launcher's side of the fork server: starts and signals workers, and receives their exits.

    Args:
        job: function that runs in each worker; it need not be importable.
        ignored: signals that the server ignores besides SIGINT and SIGHUP.
        preload: function that imports packages in the server, before it forks workers. It returns
            the name of a package whose import makes forks unsafe, or `None`.
    """

    def __init__(
        self, job: Job, ignored: Iterable[signal.Signals] = (), preload: Preload | None = None
    ) -> None:
        self._exits: list[Exit] = []
        launcher = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._pid = processes.fork()
        if self._pid == 0:
            self._socket.close()
            # An empty handler instead of SIG_IGN, which workers would keep after `exec`.
            for number in {signal.SIGINT, signal.SIGHUP, signal.SIGCHLD, *ignored}:
                signal.signal(number, lambda *_: None)
            _serve_and_exit(theirs, job, launcher, preload)
        theirs.close()

    def start(self, request: ForkRequest, streams: Sequence[int]) -> int:
        """Fork a worker whose standard streams are the descriptors `streams`; return its process id.

        Raises:
            RunError: if the server has ended or could not fork.
        """
        try:
            socket.send_fds(self._socket, [json.dumps(asdict(request)).encode()], streams)
        except OSError as error:
            raise self._gone() from error
        while True:
            answer = self._receive()
            if "started" in answer:
                return int(answer["started"])
            if "refused" in answer:
                raise RunError(f"rank {request.rank} could not be started: {answer['refused']}")
            self._exits.append(Exit(**answer))

    def wait_for_preload(self, check: Callable[[], None]) -> str | None:
        """Wait until `preload` has run in the server, and return its result.

        The result is the name of a package that makes forks unsafe, or `None`. `check` is called ten times
        a second; if it raises an exception, the server is killed.
        """
        try:
            while not self._has_message(_CHECK_SECONDS):
                check()
        except BaseException:
            processes.signal_session(self._pid, signal.SIGKILL)
            self.close()
            raise
        problem: str | None = self._receive()["problem"]
        return problem

    def poll(self) -> list[Exit]:
        """Return the exits of workers that ended since the last call, without waiting."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self._exits.append(Exit(**self._receive(socket.MSG_DONTWAIT)))
        exits, self._exits = self._exits, []
        return exits

    def wait(self, seconds: float) -> None:
        """Wait until a worker ends, but at most `seconds`."""
        if not self._exits:
            self._has_message(seconds)

    def signal(self, signum: int, only: Collection[int] | None = None) -> None:
        """Send a signal to running workers.

        By default all processes in the workers' sessions get the signal. With `only`, just the workers with
        these process ids get it, and not their children.
        """
        message = {"signal": int(signum), "only": None if only is None else sorted(only)}
        with contextlib.suppress(OSError):
            self._socket.send(json.dumps(message).encode())

    def close(self) -> None:
        """End the server, which kills the remaining workers; kill the server if it does not end in time."""
        self._socket.close()
        with contextlib.suppress(ChildProcessError):  # closed before
            if processes.reap(self._pid, 2 * _KILL_SECONDS) is None:
                processes.end(self._pid)

    def _has_message(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def _receive(self, flags: int = 0) -> dict[str, Any]:
        try:
            data = self._socket.recv(_MESSAGE, flags)
        except ConnectionError as error:
            raise self._gone() from error
        if not data:
            raise self._gone()
        return dict(json.loads(data))

    @staticmethod
    def _gone() -> RunError:
        return RunError(
            "the fork server ended during the run; expected it to live as long as the run",
            hint="it may have been killed for memory, or by hand; --resume continues from the newest "
            "checkpoint",
        )


class Workers:
    """The worker and parameter-server processes of one launcher, until the next restart.

    Args:
        lost: function to call if the fork server has ended, before an error about it is raised.
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
        self.started: dict[int, int] = {}  # by rank, ids of all processes since the last restart
        self.exits: dict[int, Exit] = {}  # by rank, exits of the processes that have ended

    def begin(self) -> None:
        """Forget the processes of the previous generation, all of which have ended."""
        self.exits.clear()
        self.started.clear()

    def start(self, plan: Plan, worker: WorkerPlan, more: Mapping[str, str]) -> None:
        """Start one worker or parameter server of `plan`.

        `more` are environment variables in addition to `worker.env`.
        """
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

    def end(
        self, signum: signal.Signals, seconds: float, runs: Collection[int] = frozenset()
    ) -> bool:
        """Send `signum` to all workers; return whether all have ended within `seconds`.

        Parameter servers are ended by `END_SERVER`. `runs`: process ids of the ranks that are inside
        `lockstep.Run`. If these are all ranks, only the ranks get `signum`, not their child processes: each
        run needs its DataLoader workers until it has saved its state.
        """
        if living := self.living:
            ranks = [pid for rank, pid in living.items() if rank >= 0]
            self._server.signal(signum, only=ranks if ranks and set(ranks) <= set(runs) else None)
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

        If a process is inside a system call, such as a write to a file server that does not answer, the
        kernel ends the process when the call returns. Until then the process may change memory and files
        that workers read after a restart.

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
        """Print a message that SIGKILL has not ended certain processes within `seconds`.

        The message names these processes, and ends with the text `then`.
        """
        names = [f"{self._names[rank]} (process {pid})" for rank, pid in self.living.items()]
        say(f"lockstep: SIGKILL has not ended {', '.join(names)} within {seconds:.0f} s; {then}")


# --- the server process ------------------------------------------------------------------------------


def _serve_and_exit(
    connection: socket.socket, job: Job, launcher: int, preload: Preload | None
) -> NoReturn:
    """Run the fork server in this process until the launcher closes the socket or dies.

    `connection` is the server's end of the socket, and `launcher` the launcher's process id. `job` and
    `preload` are the functions given to `ForkServer`.
    """
    try:
        os.setsid()
        # Not SIGKILL: the server first kills the sessions of the workers.
        processes.die_with_parent(launcher, signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # until there are workers to end
        if preload is not None:
            problem = preload()
            connection.send(json.dumps({"problem": problem}).encode())
            if problem is not None:
                os._exit(0)
        gc.freeze()  # so that memory pages stay shared after forks
        _Server(connection, job, launcher).serve()
    except BaseException:  # whatever happens here, the launcher's stack must not be unwound
        os._exit(1)
    os._exit(0)


class _Server:
    def __init__(self, connection: socket.socket, job: Job, launcher: int) -> None:
        self._connection = connection
        self._job = job
        self._launcher = launcher
        self._ranks: dict[int, int] = {}  # living workers: process id to rank
        self._ending = False
        self._wake, wake_writer = os.pipe()
        self._own = (self._wake, wake_writer)
        for descriptor in self._own:
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(wake_writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._end)

    def _end(self, *_: object) -> None:
        # Ignore Slurm's signal to all processes of a step: while the launcher runs, it ends this server.
        self._ending = os.getppid() != self._launcher

    def serve(self) -> None:
        poll = select.poll()
        for descriptor in (self._connection.fileno(), self._wake):
            poll.register(descriptor, select.POLLIN)
        while not self._ending:
            readable = {descriptor for descriptor, _ in poll.poll()}
            if self._wake in readable:
                with contextlib.suppress(BlockingIOError):
                    while os.read(self._wake, 512):
                        pass
                self._reap()
            if self._connection.fileno() in readable and not self._handle():
                break
        self._signal_all(signal.SIGKILL)
        deadline = time.monotonic() + _KILL_SECONDS
        for pid in self._ranks:  # do not wait longer for a process that hangs in a driver
            processes.reap(pid, deadline - time.monotonic())

    def _handle(self) -> bool:
        """Handle one message from the launcher; return `False` if the launcher has closed the socket."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._connection, _MESSAGE, 3)
        except ConnectionError:
            return False
        if not data:
            return False
        message = json.loads(data)
        if "signal" not in message:
            self._start(ForkRequest(**message), descriptors)
        elif message["only"] is None:
            self._signal_all(message["signal"])
        else:
            # These workers are not reaped, so no other process has their ids.
            for pid in self._ranks.keys() & message["only"]:
                os.kill(pid, message["signal"])
        return True

    def _start(self, request: ForkRequest, streams: list[int]) -> None:
        server = os.getpid()
        # A signal that reaches the child before it has reset its handlers waits until it has.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = processes.fork()
            if pid == 0:
                self._become_worker(request, streams, server)
            self._ranks[pid] = request.rank
            self._send({"started": pid})
        except OSError as error:
            self._send({"refused": str(error)})
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, [])
            for descriptor in streams:
                os.close(descriptor)

    def _become_worker(self, request: ForkRequest, streams: list[int], server: int) -> NoReturn:
        try:
            processes.make_clean(server, streams)
            processes.bind(request.env.get(PROCESSORS))
            self._connection.close()
            for descriptor in self._own:
                os.close(descriptor)
            self._job(request)
        except BaseException as error:  # as in a shell: 127 for a command that cannot be run
            os.write(2, f"lockstep: rank {request.rank} could not start: {error!r}\n".encode())
        os._exit(127)

    def _reap(self) -> None:
        """Report the exits of workers to the launcher; kill the child processes of a failed worker."""
        for pid in list(self._ranks):
            # The process is not reaped yet, so its id still names its session.
            seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if seen is None:
                continue
            if seen.si_code != os.CLD_EXITED or seen.si_status != 0:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            left = Exit(rank=self._ranks.pop(pid), pid=pid, code=code, time=time.monotonic())
            self._send(asdict(left))

    def _signal_all(self, signum: int) -> None:
        for pid in self._ranks:
            processes.signal_session(pid, signum)

    def _send(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a launcher that is gone is noticed by the next read
            self._connection.send(json.dumps(message).encode())
