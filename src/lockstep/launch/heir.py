"""The heir of a fork server: made while the server is at work, it serves from the next generation on."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from lockstep.launch import processes, warm

#: How many heirs a server may try, and how many servers may follow each other.
_TRIES = 4
_GENERATIONS = 4
#: The most that one message may take.
_MESSAGE = 1 << 18
#: What libraries read when they are loaded, and must read as in a worker.
_READ_AT_IMPORT = ("OMP_NUM_THREADS",)

#: What an heir does with the first message that the server has left to it.
Succeed = Callable[[bytes, list[int]], NoReturn]


@dataclass(slots=True)
class _Heir:
    pid: int
    channel: socket.socket
    ready: bool = False


class Succession:
    """What a server knows of its heir.

    Args:
        generation: how many servers there were before.
    """

    def __init__(self, generation: int = 0) -> None:
        self.generation = generation
        self._hears, self._tells = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._modules: list[warm.Module] = []
        self._skipped: set[str] = set()
        self._heir: _Heir | None = None
        self._tries = _TRIES if generation < _GENERATIONS else 0
        self._environment: dict[str, str] = {}
        self._hurries = False

    @property
    def channels(self) -> list[int]:
        """Descriptors on which there may be news."""
        heirs = [] if self._heir is None else [self._heir.channel.fileno()]
        return [self._hears.fileno(), *heirs]

    def join(self, env: Mapping[str, str]) -> None:
        """Be a worker: the first of the launcher tells what it imports; nothing else of this stays."""
        self._hears.close()
        if self._heir is not None:
            self._heir.channel.close()
        if not (self._tries and warm.report(self._tells, env)):
            self._tells.close()

    def remember(self, env: Mapping[str, str]) -> None:
        """Note what of a worker's environment matters for imports."""
        self._environment = {name: env[name] for name in _READ_AT_IMPORT if name in env}
        self._hurries = warm.hurries(env)

    def attend(self, readable: set[int], succeed: Succeed) -> None:
        """Take the news; raise an heir where there are modules for one."""
        if self._heir is not None and self._heir.channel.fileno() in readable:
            self._listen(self._heir)
        if self._hears.fileno() in readable:
            with contextlib.suppress(BlockingIOError):
                # An heir at work keeps to what it has: its own workers will tell it the rest.
                self._modules += warm.parse(self._hears.recv(_MESSAGE, socket.MSG_DONTWAIT))
        if self._heir is None and self._tries and self._wanted():
            self._tries -= 1
            self._raise(succeed)

    def _wanted(self) -> list[warm.Module]:
        return warm.wanted(list(dict.fromkeys(self._modules)), self._skipped)

    def _listen(self, heir: _Heir) -> None:
        word: dict[str, Any] = {"problem": None}
        heir.ready = False  # it speaks once; what comes later is its end
        with contextlib.suppress(OSError, ValueError):
            word = json.loads(heir.channel.recv(_MESSAGE))
            heir.ready = word["problem"] is None
        if not heir.ready:
            self._skipped.add(str(word["problem"]))
            self._tries = self._tries if word["problem"] else 0
            self._drop()

    def _raise(self, succeed: Succeed) -> None:
        server = os.getpid()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = processes.fork()
        except OSError:  # no memory, no process: then there is no heir
            self._tries = 0
            return
        if pid == 0:
            ours.close()
            self._be_the_heir(server, theirs, succeed)
        theirs.close()
        self._heir = _Heir(pid, ours)

    def _be_the_heir(self, server: int, channel: socket.socket, succeed: Succeed) -> NoReturn:
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            processes.die_with_parent(server, signal.SIGTERM)
            self._hears.close()
            self._tells.close()
            os.environ.update(self._environment)
            problem = warm.import_all(self._wanted(), hurry=self._hurries)
            if problem is not None:
                warm.end_children()
            channel.send(json.dumps({"problem": problem}).encode())
            data, descriptors, _, _ = socket.recv_fds(channel, _MESSAGE, 3)
            channel.close()
            if data:
                processes.freeze()
                succeed(data, list(descriptors))
        except BaseException:  # whatever happens here, the server's stack must not be unwound
            os._exit(1)
        os._exit(0)

    def hand_over(self, data: bytes, descriptors: list[int]) -> int | None:
        """Leave the service to the heir, beginning with a message; return its process id.

        `None` if there is no heir who is ready.
        """
        heir = self._heir
        if heir is None or not heir.ready:
            return None
        try:
            socket.send_fds(heir.channel, [data], descriptors)
        except OSError:
            self._drop()
            return None
        return heir.pid

    def close(self) -> None:
        """Let nobody follow."""
        self._tries = 0
        self._drop()

    def _drop(self) -> None:
        """End the heir, whose service is not wanted."""
        heir, self._heir = self._heir, None
        if heir is not None:
            heir.channel.close()
            os.kill(heir.pid, signal.SIGKILL)
            os.waitpid(heir.pid, 0)
