"""Parameter servers of a run: those of `lockstep run`, or processes that rank 0 starts.

Under another launcher rank 0 starts them with the first model that needs them. They end with it, when the
last such model is closed, or rank 0 dies.
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
from dataclasses import asdict
from pathlib import Path

from lockstep.engine.parameter_server import discovery
from lockstep.engine.parameter_server.client import Client, Clients
from lockstep.engine.parameter_server.discovery import ParameterServerAddress
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.errors import PeerError
from lockstep.world.device_types import HIDDEN
from lockstep.world.environments.lockstep import SERVER, SERVER_ROOT, TOKEN
from lockstep.world.network import LOOPBACK
from lockstep.world.rendezvous.rank_rendezvous import RankRendezvous, join_timeout

#: How long a server may take to end when all workers have left.
_END_SECONDS = 5.0


class Servers:
    """The servers of a run; rank 0 may start them."""

    def __init__(
        self, rendezvous: RankRendezvous, count: int, directory: Path, threads: int
    ) -> None:
        self._rendezvous, self._count, self._threads = rendezvous, count, threads
        self._logs = directory / "logs"
        self._processes: list[subprocess.Popen[str]] = []
        self._users, self._is_first = 0, True
        self._found: tuple[Sequence[ParameterServerAddress], str] | None = None

    def connect(self, context: ModelContext) -> Clients:
        """Return new connections to all servers, for one model; all ranks connect.

        Raises:
            PeerError: if a server is gone, cannot be found, or not be started.
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
        leads, is_first = forest.rank == 0, self._is_first
        made = Clients(clients, leads=leads, is_first=is_first, release=self._release)
        try:
            for index, address in enumerate(addresses):
                clients.append(Client(discovery.connect(address, f"server {index}"), index))
                clients[-1].authenticate(token, worker)
        except BaseException:
            made.close()
            raise
        self._is_first = False
        return made

    def _find(self) -> tuple[Sequence[ParameterServerAddress], str]:
        """Return the addresses of the servers, and their secret."""
        rendezvous, world = self._rendezvous, self._rendezvous.world
        if self._found is None and world.environment == "lockstep":
            addresses = discovery.find(world, self._count)
            self._found = addresses, discovery.token_of(os.environ)
        elif self._found is None:
            text = rendezvous.broadcast("servers/own", self._started, "start the parameter servers")
            addresses, token = json.loads(text)
            self._found = [ParameterServerAddress(**address) for address in addresses], token
        return self._found

    def _started(self) -> str:
        token = secrets.token_hex(16)
        return json.dumps([[asdict(address) for address in self._start(token)], token])

    def _start(self, token: str) -> list[ParameterServerAddress]:
        world = self._rendezvous.world
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
        return [self._read(index, seconds) for index in range(self._count)]

    def _read(self, index: int, seconds: float) -> ParameterServerAddress:
        """Wait for the address that a server prints when it listens."""
        process = self._processes[index]
        output = process.stdout
        assert output is not None
        poll = select.poll()
        poll.register(output, select.POLLIN)
        ready = poll.poll(seconds * 1000)
        if ready and (text := output.readline()):
            return ParameterServerAddress(**json.loads(text))
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_SECONDS if ready else 0)
        code, hint = process.returncode, f"see {self._logs / f'server-{index}.log'}"
        process.kill()
        self._end()
        if code is None:
            raise PeerError(f"server {index} did not listen within {seconds:g} s", hint=hint)
        raise PeerError(f"server {index} ended with exit code {code} before it listened", hint=hint)

    def _release(self) -> None:
        """Count a model that has left the servers; after the last model end those of rank 0."""
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
            # One that still serves another rank ends by itself when that has left.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
        self._processes.clear()
