"""Trying connections: one listener that says whose it is, and many attempts at once at those of others.

All of it runs in a thread with an event loop, which lives for the length of a `with` block, so that the
listener answers whatever its process waits for.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import os
import secrets
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from lockstep.errors import WorldError
from lockstep.world.port_discovery import listen

_GREETING = b'{"lockstep": "survey"}\n'
#: Bytes of a greeting or of an answer, at most.
_LINE = 256
#: Seconds that a visitor may take to greet.
_PATIENCE = 2.0
#: Seconds that the thread may take to open its listener, and to end.
_STARTING, _ENDING = 20.0, 5.0
#: Connections that are tried at the same time: a process may have 1,024 files open by default.
_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class Target:
    """Where a member may be: an address and a port."""

    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one attempt.

    Attributes:
        source: this host's address that the connection was made from; `None` without a connection.
        token: what the listener said it is; `None` if it did not answer in our words.
        failure: why there is no answer, in words; `None` if there is one.
    """

    source: str | None = None
    token: str | None = None
    failure: str | None = None


class Prober:
    """A listener, and the means to try others; to be used in a `with` block.

    Attributes:
        token: what the listener answers; nobody can guess it.
        port: where it listens, on all interfaces.
    """

    def __init__(self) -> None:
        self.token = secrets.token_hex(16)
        self._socket = listen(0, loopback=False)
        self.port: int = self._socket.getsockname()[1]
        self._open: set[asyncio.Transport] = set()
        self._started = threading.Event()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="lockstep-survey", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        started = self._started.wait(_STARTING)
        if self._failure is not None or not started:
            self._socket.close()
            why = reason(self._failure) if self._failure else f"nothing within {_STARTING:g} s"
            raise WorldError(
                f"this host cannot listen for the others while the network is tried: {why}",
                hint="look at the limit of open files (ulimit -n), and at the load of this host",
            ) from self._failure
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(_ENDING)

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except Exception as error:
            self._failure = error
        finally:
            self._started.set()

    async def _live(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        doorman = functools.partial(_Doorman, self.token, self._open)
        async with await self._loop.create_server(doorman, sock=self._socket):
            self._started.set()
            await self._over.wait()
            for transport in self._open:
                transport.abort()

    def probe(self, targets: Sequence[Target], seconds: float) -> list[Outcome]:
        """Try all targets at once; return what came of each, after `seconds` at the latest.

        Targets that cannot all be tried at once are tried in their order.
        """
        trying = asyncio.run_coroutine_threadsafe(_try_all(targets, seconds), self._loop)
        return trying.result()


class _Doorman(asyncio.Protocol):
    """Answers one visitor who greets as we do, and nobody else."""

    def __init__(self, token: str, visitors: set[asyncio.Transport]) -> None:
        self._answer = json.dumps({"lockstep": "survey", "token": token}).encode() + b"\n"
        self._visitors = visitors
        self._heard = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._visitors.add(transport)
        self._end = asyncio.get_running_loop().call_later(_PATIENCE, transport.abort)

    def data_received(self, data: bytes) -> None:
        self._heard += data[:_LINE]
        if self._heard == _GREETING:
            self._transport.write(self._answer)
            self._transport.close()
        elif not _GREETING.startswith(self._heard):
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end.cancel()
        self._visitors.discard(self._transport)


async def _try_all(targets: Sequence[Target], seconds: float) -> list[Outcome]:
    gate = asyncio.Semaphore(_AT_ONCE)
    deadline = asyncio.get_running_loop().time() + seconds

    async def attempt(target: Target) -> Outcome:
        outcome = Outcome(failure=f"not tried within {seconds:g} s")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(deadline), gate:
                outcome = Outcome(failure="timed out")
                outcome = await _try(target)
        return outcome

    return list(await asyncio.gather(*map(attempt, targets)))


async def _try(target: Target) -> Outcome:
    writer = None
    try:
        reader, writer = await asyncio.open_connection(target.address, target.port, limit=_LINE)
        source = writer.get_extra_info("sockname")[0]
        writer.write(_GREETING)
        answer = _token(await reader.readuntil())
    except (OSError, EOFError, asyncio.LimitOverrunError, ValueError) as error:
        return Outcome(failure=reason(error))
    finally:
        if writer is not None:
            writer.transport.abort()
    return Outcome(source=source, token=answer)


def _token(line: bytes) -> str:
    """Read an answer; whatever it is, it is short and no more than parsed."""
    told = json.loads(line)
    if not isinstance(told, dict) or told.get("lockstep") != "survey":
        raise ValueError("another protocol")
    return str(told.get("token"))


_WORDS = {
    errno.ECONNREFUSED: "connection refused",
    errno.EINVAL: "no route",  # what a blackhole in the routing table gives
    errno.ENETUNREACH: "no route",
    errno.EHOSTUNREACH: "no answer from the host, or no route to it",
    errno.EACCES: "forbidden by a route or a firewall here",
    errno.EPERM: "forbidden by a firewall here",
}


def reason(error: Exception) -> str:
    """Return why an attempt failed, in words."""
    if isinstance(error, TimeoutError):
        return "timed out"
    if isinstance(error, ConnectionResetError):
        return "the connection was reset"
    if not isinstance(error, OSError):
        return "answered by something else than Lockstep"
    code = error.errno or 0
    return _WORDS.get(code) or os.strerror(code).lower()
