"""Port discovery: find the port of a job's store on its host.

The host of the store listens at the first free port of a sequence that is computed from the job's name. To
each connection it sends a hash of this name, and the port of the store, which the system chose. The other
processes try the ports of the sequence until the hash matches, so that they never connect to another job or
program.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any, Self

from lockstep.errors import UnreachableError, WorldError
from lockstep.world.network import interface_towards, listen, why_unreached
from lockstep.world.waiting import Check, go_on

#: Range of ports: above well-known services, below the ports that Linux assigns to clients. The number of
#: ports is prime, so that a sequence with any stride reaches each port once.
_FIRST_PORT, _LAST_PORT = 18_000, 31_998
_CANDIDATES = 16
_CONNECT_SECONDS = 2.0
_LINE = 300  # bytes of an answer
#: Seconds without any answer of the host, even a refused connection, after which it counts as unreachable.
_UNREACHABLE_SECONDS = 6.0
_PAUSE = (0.02, 0.25)
#: Errors of `accept` while the system is out of resources, after which it is tried again.
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

#: An address and a port.
SocketAddress = tuple[str, int]


def sequence(name: str) -> tuple[int, ...]:
    """Return the ports at which the host of job `name` may answer, in the order of attempts."""
    span = _LAST_PORT - _FIRST_PORT + 1
    digest = hashlib.sha256(os.fsencode(name)).digest()
    start, stride = int.from_bytes(digest[:8]), int.from_bytes(digest[8:16]) % (span - 1) + 1
    ports = dict.fromkeys(_FIRST_PORT + (start + k * stride) % span for k in range(4 * _CANDIDATES))
    return tuple(ports)[:_CANDIDATES]


class Announcer:
    """Thread that sends one message to each connection of a listening socket, until `close`."""

    def __init__(self, listener: socket.socket, message: Mapping[str, Any]) -> None:
        self._listener, self._line = listener, json.dumps(message).encode() + b"\n"
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-announce", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if error.errno in _NO_ROOM:
                    self._closed.wait(_PAUSE[1])  # connections wait in the system's queue meanwhile
                continue
            with connection, contextlib.suppress(OSError):
                connection.setblocking(False)  # the line fits into the socket's buffer
                connection.send(self._line)

    def close(self) -> None:
        """End the thread, and close the listening socket."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(1.0)
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def announce(
    name: str, store_port: int, *, loopback: bool = False, port: int | None = None
) -> Announcer:
    """Start to send the port of job `name`'s store to each process that looks for this store.

    The returned `Announcer` listens at `port` if given, or else at the first free port of the job's
    sequence, on the loopback interface only if `loopback`. `store_port` is the port of the store.

    Raises:
        WorldError: if no such port is free.
    """
    ports = sequence(name) if port is None else (port,)
    for candidate in ports:
        with contextlib.suppress(OSError):
            listener = listen(candidate, loopback=loopback)
            return Announcer(listener, {"name": _hash(name), "port": store_port})
    raise WorldError(
        f"no port is free for the rendezvous: {', '.join(map(str, ports))}",
        hint="set MASTER_PORT or --master-port to one that is",
    )


def find(
    addresses: Sequence[str],
    name: str,
    who: str,
    *,
    seconds: float,
    port: int | None = None,
    check: Check = go_on,
) -> SocketAddress:
    """Find the store of job `name` on a host by port discovery; return its address and port.

    `addresses` are those of the host. The host answers at `port` if given, otherwise at a port that follows
    from `name`. `who` names this process in messages. `check` is called between attempts.

    Raises:
        UnreachableError: if no packet reaches the host.
        WorldError: if the host does not answer within `seconds`.
    """
    ports = sequence(name) if port is None else (port,)
    wanted = _hash(name)

    def ask(place: SocketAddress) -> SocketAddress | None:
        with socket.create_connection(place, timeout=_CONNECT_SECONDS) as connection:
            message = receive(connection, time.monotonic() + _CONNECT_SECONDS)
        known = message.get("name") == wanted and isinstance(message.get("port"), int)
        return (place[0], message["port"]) if known else None

    return _Search(addresses, ports, who, ask).run(seconds, check)


def await_port(addresses: Sequence[str], port: int, who: str, seconds: float) -> str:
    """Wait until a host listens at `port`; return the host's address that accepted a connection.

    `addresses` are those of the host. `who` names this process in messages.

    Raises:
        UnreachableError: if no packet reaches the host.
        WorldError: if no server listens within `seconds`.
    """

    def look(place: SocketAddress) -> SocketAddress:
        socket.create_connection(place, timeout=_CONNECT_SECONDS).close()
        return place

    return _Search(addresses, (port,), who, look).run(seconds, go_on)[0]


@dataclass(slots=True)
class _Search:
    """Tries to connect to each address and port of a host, again and again, until `look` succeeds.

    `look` connects to one address and port; it returns the address and port of the store that was found, or
    `None` to go on. `who` names this process in messages.
    """

    addresses: Sequence[str]
    ports: Sequence[int]
    who: str
    look: Callable[[SocketAddress], SocketAddress | None]
    #: Whether the host has answered, even by refusing a connection.
    answered: bool = False
    #: Reason of the last failure at each address.
    failures: dict[str, str] = field(default_factory=dict)

    def run(self, seconds: float, check: Check) -> SocketAddress:
        places = [(address, port) for address in self.addresses for port in self.ports]
        began, pause = time.monotonic(), _PAUSE[0]
        pool = ThreadPoolExecutor(max(1, len(places)))
        try:
            while True:
                check()
                for trial in as_completed([pool.submit(self._try, place) for place in places]):
                    if (found := trial.result()) is not None:
                        return found
                if not self.answered and time.monotonic() - began > _UNREACHABLE_SECONDS:
                    raise self._unreachable()
                if time.monotonic() + pause > began + seconds:
                    break
                time.sleep(pause)
                pause = min(2 * pause, _PAUSE[1])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        raise WorldError(
            f"{self.who} found no rendezvous at {' or '.join(self.addresses)} within {seconds:g} s",
            hint="is the first one started, there, and with the same settings?",
        )

    def _try(self, place: SocketAddress) -> SocketAddress | None:
        try:
            found = self.look(place)
        except (ConnectionRefusedError, ValueError):  # refused, or another program listens there
            found = None
        except OSError as error:
            self.failures[place[0]] = why_unreached(error)
            return None
        self.answered = True
        return found

    def _unreachable(self) -> UnreachableError:
        leaving = [(address, interface_towards(address)) for address in self.addresses]
        tried = "; ".join(
            f"{address}{f' from {own}' if own else ' (no route from here)'}: "
            f"{self.failures.get(address)}"
            for address, own in leaving
        )
        return UnreachableError(
            f"{self.who} cannot reach {' or '.join(self.addresses) or 'a host without an address'} "
            f"on port {self.ports[0]}{' and others' if len(self.ports) > 1 else ''}: {tried}",
            hint="check the address, the interface, and firewalls between the two",
        )


def receive(connection: socket.socket, deadline: float) -> dict[str, Any]:
    """Return the JSON object that an `Announcer` has sent over `connection`.

    Raises:
        ValueError: if no line with a JSON object arrives before `deadline`, a `time.monotonic` value.
    """
    line = b""
    while not line.endswith(b"\n") and len(line) < _LINE:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ValueError("no line")
        connection.settimeout(left)
        try:
            part = connection.recv(_LINE - len(line))
        except OSError as error:
            raise ValueError("no line") from error
        if not part:
            raise ValueError("no line")
        line += part
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("no object")  # noqa: TRY004 - a wrong value from the network
    return message


def _hash(name: str) -> str:
    return hashlib.sha256(os.fsencode(name)).hexdigest()
