"""The door: how processes that share a name, but no port, find the one of them that has a store.

The host of the store listens at the first free port of a sequence that follows from the name; the
others go through the same sequence and knock. Both prove in a handshake that they mean the same name,
so that two jobs on one node, or anything else that listens there, are never taken for each other. The
port of the store itself, which the host tells, is one that the system chose.
"""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from lockstep.errors import UnreachableError, WorldError

#: Ports of the sequences: above those of well-known services, below those that Linux gives to clients.
_FIRST_PORT, _LAST_PORT = 18_000, 31_999
_CANDIDATES = 16
_HANDSHAKE_SECONDS = 2.0
_LINE = 900  # bytes; short enough that no nesting in it is too deep to parse
#: As long without any sign of the host, not even a refusal, means that no packet gets there.
_UNREACHABLE_SECONDS = 6.0
_CONNECT_SECONDS = 2.0
_PAUSE = (0.02, 0.25)
_LOOK_SECONDS = 0.25

#: Called while something is waited for; raises when that has become pointless.
Check = Callable[[], None]


def _go_on() -> None:
    """Go on waiting."""


def sequence(name: str) -> tuple[int, ...]:
    """Return the ports at which the door of `name` may be, in the order in which they are tried."""
    span = _LAST_PORT - _FIRST_PORT + 1
    digest = hashlib.sha256(name.encode()).digest()
    start, stride = int.from_bytes(digest[:8]), int.from_bytes(digest[8:16]) % (span - 1) + 1
    ports = dict.fromkeys(_FIRST_PORT + (start + k * stride) % span for k in range(4 * _CANDIDATES))
    return tuple(ports)[:_CANDIDATES]


@dataclass(slots=True, kw_only=True)
class Door:
    """The host's side.

    Args:
        name: what all processes of the job call it.
        store_port: the port that guests are told.
        guests: who is expected, by what they call themselves; `None` lets `count` come, whoever they are.
        count: how many are expected where nobody knows their names.
        loopback: listen on the loopback interface only.
        port: the one port to listen at, where somebody chose it.
    """

    name: str
    store_port: int
    guests: Sequence[str] | None = None
    count: int = 0
    loopback: bool = False
    port: int | None = None

    def serve(self, seconds: float, check: Check = _go_on) -> None:
        """Answer until everybody has come.

        Args:
            seconds: how long guests may take.
            check: called again and again meanwhile; may raise to end it.

        Raises:
            WorldError: naming who has not come within `seconds`, or where no port is free.
        """
        tokens: dict[str, str] = {}
        deadline = time.monotonic() + seconds
        with self._listen() as listener:
            while not self._complete(tokens):
                check()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._missing(tokens, seconds)
                listener.settimeout(min(left, _LOOK_SECONDS))
                with contextlib.suppress(TimeoutError):
                    connection, _ = listener.accept()
                    with connection:
                        self._answer(connection, tokens)

    def _complete(self, tokens: dict[str, str]) -> bool:
        expected = self.count if self.guests is None else len(self.guests)
        return len(tokens) >= expected

    def _listen(self) -> socket.socket:
        for port in self._ports():
            with contextlib.suppress(OSError):
                return listen(port, loopback=self.loopback)
        raise WorldError(
            f"no port is free for the ranks to meet at: {', '.join(map(str, self._ports()))}",
            hint="set MASTER_PORT to one that is",
        )

    def _ports(self) -> tuple[int, ...]:
        return sequence(self.name) if self.port is None else (self.port,)

    def _answer(self, connection: socket.socket, tokens: dict[str, str]) -> None:
        with contextlib.suppress(OSError, ValueError):  # whoever breaks off has not come
            connection.settimeout(_HANDSHAKE_SECONDS)
            asked = _receive(connection)
            guest, token = str(asked.get("guest")), str(asked.get("token"))
            refusal = self._refusal(asked.get("name"), guest, token, tokens)
            told = {"port": self.store_port} if refusal is None else {"refused": refusal}
            _send(connection, {"name": self.name, **told})
            if refusal is None:
                tokens[guest] = token

    def _refusal(self, name: object, guest: str, token: str, tokens: dict[str, str]) -> str | None:
        if name != self.name:
            return "another job"
        if self.guests is not None and guest not in self.guests:
            return f"{guest} is not expected"
        # The same guest may ask again, where the answer was lost on its way.
        return f"{guest} has come before" if tokens.get(guest, token) != token else None

    def _missing(self, tokens: dict[str, str], seconds: float) -> WorldError:
        if self.guests is None:
            what = f"{self.count - len(tokens)} of {self.count} did not come"
        else:
            what = f"{_shortened([one for one in self.guests if one not in tokens])} did not come"
        return WorldError(
            f"{what} within {seconds:g} s; came: {_shortened(list(tokens)) or 'nobody'}",
            hint="look at the output of the others: are they started, and on which node?",
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
    check: Check = _go_on,
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
        except ValueError:  # something that listens there and speaks otherwise
            self.signs = True
        else:
            self.signs = True
            if told.get("name") == self._name and isinstance(told.get("port"), int):
                return Answer(address=place[0], port=told["port"])
            if told.get("name") == self._name:
                self._refusal = str(told.get("refused"))
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
        with socket.create_connection(place, timeout=_CONNECT_SECONDS) as connection:
            connection.settimeout(_HANDSHAKE_SECONDS)
            _send(connection, {"name": self._name, "guest": self._guest, "token": self._token})
            return _receive(connection)

    def unreachable(self, addresses: Sequence[str], ports: Sequence[int]) -> UnreachableError:
        tried = "; ".join(f"{address}: {self._failures.get(address)}" for address in addresses)
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


def listen(port: int, *, loopback: bool) -> socket.socket:
    """Return a socket that listens at `port`, of this host alone or of all its interfaces."""
    if loopback:
        return socket.create_server(("127.0.0.1", port), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True
        )
    return socket.create_server(("", port), backlog=1024)


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


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _receive(connection: socket.socket) -> dict[str, Any]:
    with connection.makefile("rb") as lines:
        told = json.loads(lines.readline(_LINE))
    if not isinstance(told, dict):
        raise ValueError("no object")  # noqa: TRY004 - a wrong value from the network
    return told


def _shortened(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
