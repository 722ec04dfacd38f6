"""The door: how processes that share a name, but no port, find the one of them that has a store.

The host of the store listens at the first free port of a sequence that follows from the name; the
others go through the same sequence and knock. Both prove in a handshake that they mean the same name,
so that two jobs on one node, or anything else that listens there, are never taken for each other. The
port of the store itself, which the host tells, is one that the system chose.

    guest: name, guest, token ──> host: name, welcome ──> guest: here ──> host: name, port

The host counts a guest only once it has said that it is still there: one that had to wait too long has
gone and will ask again, and would find the door closed if it had been counted.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import json
import os
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from lockstep.errors import UnreachableError, WorldError
from lockstep.world.network import interface_towards
from lockstep.world.waiting import Check, go_on

#: Ports of the sequences: above those of well-known services, below those that Linux gives to clients. A
#: prime number of them, so that no stride meets a port twice.
_FIRST_PORT, _LAST_PORT = 18_000, 31_998
_CANDIDATES = 16
#: How long a visitor of the host may take to say what it wants: one that says nothing keeps others
#: waiting, who must not give up meanwhile.
_REQUEST_SECONDS = 1.0
_HANDSHAKE_SECONDS = 2.0
#: How long a guest waits for the last word of a host that has counted it.
_LAST_WORD_SECONDS = 10.0
_LINE = 900  # bytes
#: As long without any sign of the host, not even a refusal, means that no packet gets there.
_UNREACHABLE_SECONDS = 6.0
_CONNECT_SECONDS = 2.0
_PAUSE = (0.02, 0.25)
_LOOK_SECONDS = 0.25
#: What `accept` fails of while the system has no room for another connection: that passes.
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

#: Who has come: what it calls itself, and its token.
_Came = dict[tuple[str, str], None]


def sequence(name: str) -> tuple[int, ...]:
    """Return the ports at which the door of `name` may be, in the order in which they are tried."""
    span = _LAST_PORT - _FIRST_PORT + 1
    digest = hashlib.sha256(os.fsencode(name)).digest()
    start, stride = int.from_bytes(digest[:8]), int.from_bytes(digest[8:16]) % (span - 1) + 1
    ports = dict.fromkeys(_FIRST_PORT + (start + k * stride) % span for k in range(4 * _CANDIDATES))
    return tuple(ports)[:_CANDIDATES]


@dataclass(slots=True, kw_only=True)
class PortDiscovery:
    """The host's side.

    Args:
        name: what all processes of the job call it.
        store_port: the port that guests are told.
        guests: who is expected, by what they call themselves; `None` lets `count` come, whoever they are.
        count: how many are expected where nobody knows their names.
        loopback: listen on the loopback interface only.
        port: the one port to listen at, where somebody chose it.
        hint: what to look at if somebody does not come.

    Attributes:
        came: who has come so far.
    """

    name: str
    store_port: int
    guests: Sequence[str] | None = None
    count: int = 0
    loopback: bool = False
    port: int | None = None
    hint: str | None = None
    came: _Came = field(default_factory=dict, init=False)

    def serve(self, seconds: float, check: Check = go_on) -> None:
        """Answer until everybody has come.

        Args:
            seconds: how long guests may take.
            check: called again and again meanwhile; may raise to end it.

        Raises:
            WorldError: naming who has not come within `seconds`, or where no port is free.
        """
        with self.listen() as listener:
            self.serve_at(listener, seconds, check)

    def serve_at(self, listener: socket.socket, seconds: float, check: Check = go_on) -> None:
        """Do the same with what `listen` has opened."""
        came = self.came
        deadline = time.monotonic() + seconds
        while not self._complete(came):
            check()
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._missing(came, seconds)
            listener.settimeout(min(left, _LOOK_SECONDS))
            try:
                connection, _ = listener.accept()
            except (TimeoutError, ConnectionAbortedError):
                continue
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                time.sleep(_PAUSE[1])  # whoever knocks waits in the system's queue meanwhile
                continue
            with connection:
                self._answer(connection, came)

    def _complete(self, came: _Came) -> bool:
        expected = self.count if self.guests is None else len(self.guests)
        return len(came) >= expected

    def listen(self) -> socket.socket:
        """Open the first port of the sequence that is free.

        Raises:
            WorldError: if none is.
        """
        for port in self._ports():
            with contextlib.suppress(OSError):
                return listen(port, loopback=self.loopback)
        raise WorldError(
            f"no port is free for the ranks to meet at: {', '.join(map(str, self._ports()))}",
            hint="set MASTER_PORT or --master-port to one that is",
        )

    def _ports(self) -> tuple[int, ...]:
        return sequence(self.name) if self.port is None else (self.port,)

    def _answer(self, connection: socket.socket, came: _Came) -> None:
        sign = _sign(self.name)
        with contextlib.suppress(OSError, ValueError):  # whoever breaks off has not come
            asked = _receive(connection, _REQUEST_SECONDS)
            guest, token = str(asked.get("guest")), str(asked.get("token"))
            refusal = self._refusal(asked.get("name") == sign, guest, token, came)
            if refusal is not None:
                _send(connection, {"name": sign, "refused": refusal})
                return
            _send(connection, {"name": sign, "welcome": True})
            _receive(connection, _HANDSHAKE_SECONDS)
            came[guest, token] = None
            _send(connection, {"name": sign, "port": self.store_port})

    def _refusal(self, is_ours: bool, guest: str, token: str, came: _Came) -> str | None:
        if not is_ours:
            return "another job"
        if self.guests is None:
            return None  # two that call themselves the same are two: nobody gave them numbers
        if guest not in self.guests:
            return f"{guest} is not expected"
        # The same guest may ask again, where the answer was lost on its way.
        again = any(name == guest and other != token for name, other in came)
        return f"{guest} has come before" if again else None

    def _missing(self, came: _Came, seconds: float) -> WorldError:
        names = [guest for guest, _ in came]
        if self.guests is None:
            what = f"{self.count - len(names)} of {self.count} did not come"
        else:
            what = f"{_shortened([one for one in self.guests if one not in names])} did not come"
        return WorldError(
            f"{what} within {seconds:g} s; came: {_shortened(names) or 'nobody'}",
            hint=self.hint
            or "look at the output of the others: are they started, and on which node?",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a guest learns: the address at which the host was reached, and the port of its store."""

    address: str
    port: int


def knock(
    addresses: Sequence[str],
    name: str,
    guest: str,
    *,
    token: str,
    seconds: float,
    port: int | None = None,
    check: Check = go_on,
) -> Answer:
    """Find the door of `name` on a host, and go through it.

    Args:
        addresses: where the host may be reached.
        name: what all processes of the job call it.
        guest: what this process calls itself.
        token: tells this process from another that calls itself the same.
        seconds: how long the host may take to open.
        port: the one port at which to knock, where somebody chose it.
        check: called again and again meanwhile; may raise to end it.

    Raises:
        UnreachableError: if no packet reaches the host.
        WorldError: if it does not open within `seconds`, or refuses this process.
    """
    ports = sequence(name) if port is None else (port,)
    visitor = _Visitor(name, guest, token)
    places = [(address, candidate) for address in addresses for candidate in ports]
    began = time.monotonic()
    with ThreadPoolExecutor(max_workers=max(1, len(places))) as pool:
        for _ in _rounds(seconds):
            check()
            answers = list(pool.map(visitor.visit, places))
            found = next((one for one in answers if isinstance(one, Answer)), None)
            if found is not None:
                return found
            if visitor.is_refused:
                break
            if not visitor.signs and time.monotonic() - began > _UNREACHABLE_SECONDS:
                raise visitor.unreachable(addresses, ports)
    raise visitor.nobody(addresses, seconds)


def await_port(addresses: Sequence[str], port: int, guest: str, seconds: float) -> str:
    """Wait until something listens at `port` of a host; return the address at which it does.

    Raises:
        UnreachableError: if no packet reaches the host.
        WorldError: if nothing listens within `seconds`.
    """
    visitor = _Visitor("", guest, "")
    began = time.monotonic()
    for _ in _rounds(seconds):
        for address in addresses:
            if visitor.look((address, port)):
                return address
        if not visitor.signs and time.monotonic() - began > _UNREACHABLE_SECONDS:
            raise visitor.unreachable(addresses, (port,))
    raise visitor.nobody(addresses, seconds)


class _Visitor:
    """One guest's visits: what it has met with so far."""

    def __init__(self, name: str, guest: str, token: str) -> None:
        self._name, self._guest, self._token = name, guest, token
        #: whether anything has come back from the host, be it a refusal
        self.signs = False
        self._refusal: str | None = None
        self._failures: dict[str, str] = {}

    @property
    def is_refused(self) -> bool:
        """Whether the host does not want this guest: waiting won't help."""
        return self._refusal is not None

    def visit(self, place: tuple[str, int]) -> Answer | None:
        """Knock once at an address and a port."""
        try:
            told = self._ask(place)
        except ConnectionRefusedError:
            self.signs = True
        except OSError as error:
            self._failures[place[0]] = reason(error)
        except ValueError:
            pass  # something that listens there and speaks otherwise
        else:
            port, refusal = told.get("port"), told.get("refused")
            if told.get("name") == _sign(self._name) and isinstance(port, int):
                return Answer(address=place[0], port=port)
            if told.get("name") == _sign(self._name) and isinstance(refusal, str):
                self._refusal = refusal
        return None

    def look(self, place: tuple[str, int]) -> bool:
        """Return whether something listens at an address and a port."""
        try:
            socket.create_connection(place, timeout=_CONNECT_SECONDS).close()
        except ConnectionRefusedError:
            self.signs = True
        except OSError as error:
            self._failures[place[0]] = reason(error)
        else:
            return True
        return False

    def _ask(self, place: tuple[str, int]) -> dict[str, Any]:
        sign = _sign(self._name)
        with socket.create_connection(place, timeout=_CONNECT_SECONDS) as connection:
            self.signs = True
            _send(connection, {"name": sign, "guest": self._guest, "token": self._token})
            told = _receive(connection, _HANDSHAKE_SECONDS)
            if told.get("name") != sign or told.get("welcome") is not True:
                return told
            _send(connection, {"name": sign, "here": True})
            return _receive(connection, _LAST_WORD_SECONDS)

    def unreachable(self, addresses: Sequence[str], ports: Sequence[int]) -> UnreachableError:
        tried = "; ".join(
            f"{address}{_way(address)}: {self._failures.get(address)}" for address in addresses
        )
        return UnreachableError(
            f"{self._guest} cannot reach {' or '.join(addresses) or 'a host without an address'} "
            f"on port {ports[0]}{' and others' if len(ports) > 1 else ''}: {tried}",
            hint="check the address, the interface, and firewalls between the two",
        )

    def nobody(self, addresses: Sequence[str], seconds: float) -> WorldError:
        where = " or ".join(addresses)
        if self._refusal is not None:
            return WorldError(
                f"{self._guest} was turned away at {where}: {self._refusal}",
                hint="each needs a number of its own, and each launch a name (--rdzv-id)",
            )
        return WorldError(
            f"{self._guest} found nobody to meet at {where} within {seconds:g} s",
            hint="is the first one started, there, and with the same settings?",
        )


def _way(address: str) -> str:
    """Return in words by which interface packets leave for `address`."""
    leaving = interface_towards(address)
    return f" from {leaving.name} {leaving.address}" if leaving else " (no route from here)"


def listen(port: int, *, loopback: bool) -> socket.socket:
    """Return a socket that listens at `port`, of this host alone or of all its interfaces."""
    if loopback:
        return socket.create_server(("127.0.0.1", port), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=1024)


def listens_locally(address: str | None) -> bool:
    """Return whether guests who look for `address` find what listens on this host's 127.0.0.1 alone."""
    return address in ("localhost", "127.0.0.1")


def is_loopback(address: str | None) -> bool:
    """Return whether an address or a host's name means this host alone."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address or "").is_loopback
    except ValueError:
        return False


def reason(error: OSError) -> str:
    """Return why a connection failed, in the system's words."""
    if isinstance(error, TimeoutError):
        return "timed out"
    return (error.strerror or str(error)).lower()


def _rounds(seconds: float) -> Iterator[None]:
    """Go round until `seconds` are over, with a breath between that gets longer."""
    deadline = time.monotonic() + seconds
    pause = _PAUSE[0]
    while True:
        yield
        if time.monotonic() + pause > deadline:
            return
        time.sleep(pause)
        pause = min(2 * pause, _PAUSE[1])


def _sign(name: str) -> str:
    """Return what proves that `name` is meant: a name may be longer than a line."""
    return hashlib.sha256(os.fsencode(name)).hexdigest()


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.settimeout(_HANDSHAKE_SECONDS)
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket, seconds: float) -> dict[str, Any]:
    """Return what comes within `seconds`, however slowly.

    Raises:
        OSError: if nothing comes, or the connection breaks.
        ValueError: if it is no line with an object.
    """
    deadline, line = time.monotonic() + seconds, b""
    while not line.endswith(b"\n"):
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(left)
        part = connection.recv(_LINE - len(line))
        line += part
        if not part or len(line) == _LINE:
            break
    try:
        told = json.loads(line)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if not isinstance(told, dict):
        raise ValueError("no object")  # noqa: TRY004 - a wrong value from the network
    return told


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
