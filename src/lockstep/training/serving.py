"""The parameter servers of a run: those of `lockstep run`, or processes that rank 0 starts.

Under another launcher rank 0 starts them with the first model that needs them. They end with it, when the
last such model is closed, or rank 0 dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from lockstep.errors import PeerError
from lockstep.world import servers
from lockstep.world.environments.lockstep import SERVER, SERVER_ROOT, TOKEN
from lockstep.world.meet import LOOPBACK, Meeting
from lockstep.world.servers import Place

_KEY = "servers/own"
#: How long a server may take to end when all workers have left.
_END_SECONDS = 5.0


class Serving:
    """Where the servers of a run are; rank 0 may start them.

    Args:
        meeting: with the other ranks.
        count: number of servers.
        directory: of the run.
    """

    def __init__(self, meeting: Meeting, count: int, directory: Path) -> None:
        self._meeting, self._count, self._directory = meeting, count, directory
        self._processes: list[subprocess.Popen[str]] = []
        self._users = 0
        self._found: tuple[Sequence[Place], str] | None = None

    def find(self) -> tuple[Sequence[Place], str]:
        """Return where the servers are, and the secret that they know; `release` follows on each call.

        Raises:
            PeerError: if they cannot be found, or not be started.
        """
        if self._found is None:
            world = self._meeting.world
            if world.environment == "lockstep":
                self._found = servers.find(world, self._count), servers.token_of(os.environ)
            else:
                self._found = self._own()
        self._users += 1
        return self._found

    def _own(self) -> tuple[Sequence[Place], str]:
        meeting = self._meeting
        if meeting.world.is_main:
            token = secrets.token_hex(16)
            places = [asdict(place) for place in self._start(token)]
            meeting.store.set(_KEY, json.dumps([places, token]))
        meeting.wait([_KEY], "start the parameter servers")
        found, token = json.loads(meeting.store.get(_KEY))
        return [Place(**place) for place in found], token

    def _start(self, token: str) -> list[Place]:
        world = self._meeting.world
        is_local = world.address is None or world.local_size == world.size
        address = LOOPBACK if is_local else str(world.address)
        logs = self._directory / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        environ = {**os.environ, TOKEN: token, SERVER_ROOT: sys.path[0], "CUDA_VISIBLE_DEVICES": ""}
        for index in range(self._count):
            with (logs / f"server-{index}.log").open("a") as log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "lockstep.server", address],
                        env={**environ, SERVER: str(index)},
                        stdin=subprocess.PIPE,  # closed when this process dies, whatever kills it
                        stdout=subprocess.PIPE,
                        stderr=log,
                        text=True,
                        start_new_session=True,
                    )
                )
        return [self._read(index) for index in range(self._count)]

    def _read(self, index: int) -> Place:
        output = self._processes[index].stdout
        assert output is not None
        text = output.readline()
        if text:
            return Place(**json.loads(text))
        code = self._processes[index].wait()
        self._end()
        raise PeerError(
            f"server {index} ended with exit code {code} before it listened",
            hint=f"see {self._directory / 'logs' / f'server-{index}.log'}",
        )

    def release(self) -> None:
        """A model has left the servers; after the last one those of rank 0 end."""
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
