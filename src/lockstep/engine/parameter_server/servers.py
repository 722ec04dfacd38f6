"""Parameter servers of a run, started by `lockstep run` or by rank 0.

Under another launcher rank 0 starts the servers for the first model that uses them. They end when the last
of these models is closed, or rank 0 ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from lockstep.engine.parameter_server import discovery
from lockstep.engine.parameter_server.client import Client, Clients
from lockstep.engine.parameter_server.discovery import Address
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.errors import PeerError
from lockstep.world.device_types import HIDDEN
from lockstep.world.environments.torchrun import SERVER, SERVER_ROOT, TOKEN
from lockstep.world.network import LOOPBACK
from lockstep.world.rendezvous.rank_rendezvous import RankRendezvous, join_timeout

#: Seconds that a server may take to end after all workers have disconnected.
_END_SECONDS = 5.0


class Servers:
    """The parameter servers of a run; started by the launcher, or else on rank 0 by this object.

    Args:
        count: number of servers.
        directory: run directory, for the servers' logs.
        threads: number of threads of torch in each server.
    """

    def __init__(
        self, rendezvous: RankRendezvous, count: int, directory: Path, threads: int
    ) -> None:
        self._rendezvous, self._count, self._threads = rendezvous, count, threads
        self._logs = directory / "logs"
        self._processes: list[subprocess.Popen[str]] = []
        self._users, self._is_first = 0, True
        self._found: tuple[Sequence[Address], str] | None = None

    def connect(self, context: ModelContext) -> Clients:
        """Connect to all servers for one model; all ranks call this together.

        The first call starts the servers if no launcher has done so.

        Raises:
            PeerError: if a server has ended, cannot be found, or cannot be started.
        """
        addresses, token = self._find()
        self._users += 1
        forest, key = context.forest, f"servers/{context.number}"
        if forest.rank == 0:
            context.store.set(key, uuid.uuid4().hex)
        worker = {
            "model": context.store.get(key).decode(),
            "rank": forest.rank,
            "size": forest.size,
            "replicas": context.replicas,
            "threads": self._threads,
        }
        clients: list[Client] = []
        leads = forest.rank == 0
        say = context.say if leads and self._is_first else None
        made = Clients(clients, leads=leads, say=say, release=self._release)
        try:
            for index, address in enumerate(addresses):
                clients.append(Client(discovery.connect(address, f"server {index}"), index))
                clients[-1].authenticate(token, worker)
        except BaseException:
            made.close()
            raise
        self._is_first = False
        return made

    def _find(self) -> tuple[Sequence[Address], str]:
        """Return the addresses of the servers, and the secret of the launch.

        All ranks call this together, since the first call may start the servers.
        """
        rendezvous, world = self._rendezvous, self._rendezvous.world
        if self._found is None and world.environment == "lockstep":
            self._found = discovery.find(world, self._count), discovery.token_of(os.environ)
        elif self._found is None:
            text = rendezvous.broadcast("servers/own", self._start, "start the parameter servers")
            addresses, token = json.loads(text)
            self._found = addresses, token
        return self._found

    def _start(self) -> str:
        """Start the servers on this node; return their addresses and a new secret as JSON.

        The secret authenticates workers and servers.
        """
        world, token = self._rendezvous.world, secrets.token_hex(16)
        is_local = world.address is None or world.local_size == world.size
        address = LOOPBACK if is_local else str(world.address)
        self._logs.mkdir(parents=True, exist_ok=True)
        environ = {**os.environ, TOKEN: token, SERVER_ROOT: sys.path[0], **HIDDEN}
        for index in range(self._count):
            with (self._logs / f"server-{index}.log").open("a") as log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "lockstep.engine.parameter_server", address],
                        env={**environ, SERVER: str(index)},
                        stdin=subprocess.PIPE,  # closed when this process dies, whatever kills it
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        start_new_session=True,
                    )
                )
        seconds = join_timeout().total_seconds()
        started = [self._read(index, seconds) for index in range(self._count)]
        return json.dumps([started, token])

    def _read(self, index: int, seconds: float) -> Address:
        """Wait until child process `index`, a server, prints its address; return the address.

        Raises:
            PeerError: if the server ends, or prints nothing for `seconds`.
        """
        process = self._processes[index]
        output = process.stdout
        assert output is not None
        poll = select.poll()
        poll.register(output, select.POLLIN)
        ready = poll.poll(seconds * 1000)
        if ready and (text := output.readline()):
            address: Address = json.loads(text)
            return address
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS if ready else 0)
        code, hint = process.returncode, f"see {self._logs / f'server-{index}.log'}"
        process.kill()
        self._end()
        if code is None:
            raise PeerError(f"server {index} did not listen within {seconds:g} s", hint=hint)
        raise PeerError(f"server {index} ended with exit code {code} before it listened", hint=hint)

    def _release(self) -> None:
        """Record that a model has disconnected; after the last one, end servers that rank 0 started."""
        self._users -= 1
        if not self._users:
            self._found = None
            self._end()

    def _end(self) -> None:
        for process in self._processes:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with contextlib.suppress(OSError):  # a server that died reads nothing
                    pipe.close()
        for process in self._processes:
            # A server that still serves another rank ends when that rank disconnects.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
        self._processes.clear()
