"""Server of the coordinator, with one connection for each launcher.

Each launcher listens from its start, before launcher 0 is known. A coordinator answers the launchers of its
own round, with its last decision also when the next round has begun.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from lockstep.launch.nodes.coordinator import Coordinator
from lockstep.launch.nodes.messages import LINE, Answer, LauncherReport
from lockstep.world import network
from lockstep.world.rendezvous.decode import decode

_INTERVAL = 0.02
#: How long launcher 0 waits until the others have received the last decision.
_LINGER_SECONDS = 5.0
#: A connection over which nothing comes for as long is closed.
_IDLE_SECONDS = 30.0
#: Connections at a time that have not sent the token yet, and how long each may take to.
_UNKNOWN, _GREETING_SECONDS = 128, 5.0
#: How long a launcher may take to answer at one of its addresses.
_PING_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Port and addresses at which a launcher listens, and the token of clients that belong to the launch.

    Attributes:
        addresses: where it may be reached, the likelier ones first.
    """

    port: int
    token: str
    addresses: tuple[str, ...] = ()

    @property
    def start(self) -> bytes:
        """The first bytes of each message: `json.dumps` keeps the order, and the token is first."""
        return json.dumps({"token": self.token}).encode()[:-1]

    def answers(self) -> bool:
        """Return whether the launcher can be reached at one of its addresses, and lives."""
        ping = json.dumps({"token": self.token, "ping": True}).encode() + b"\n"
        for address in self.addresses:
            with (
                contextlib.suppress(OSError),
                socket.create_connection((address, self.port), _PING_SECONDS) as connection,
                connection.makefile("rb") as reader,
            ):
                connection.sendall(ping)
                if reader.readline(LINE):
                    return True
        return False


class CoordinatorServer:
    """TCP server of a launcher: it answers reports in the rounds whose launcher 0 it is.

    It listens on the loopback interface, if all launchers are on this host and always will be. `addresses`
    are those at which this host may be reached.
    """

    def __init__(self, *, loopback: bool, addresses: tuple[str, ...] = (network.LOOPBACK,)) -> None:
        self._coordinators: dict[int, Coordinator] = {}
        self._lock = threading.Lock()
        self._callers: dict[tuple[int, int], object] = {}
        self._listener = network.listen(0, loopback=loopback)
        self._closed = threading.Event()
        self._room = threading.BoundedSemaphore(_UNKNOWN)
        port = self._listener.getsockname()[1]
        self.address = ServerAddress(port=port, token=secrets.token_hex(16), addresses=addresses)
        #: Whether to answer nothing, so that the others take this launcher for lost.
        self.is_silent = False
        self._thread = threading.Thread(
            target=self._serve, name="lockstep-coordinator", daemon=True
        )
        self._thread.start()

    def begin(self, number: int, coordinator: Coordinator) -> None:
        """Let a coordinator answer the launchers of a round."""
        with self._lock:
            self._coordinators[number] = coordinator

    def receive(self, report: LauncherReport) -> Answer:
        """Return the coordinator's answer to a report; an empty one before its round has begun."""
        with self._lock:
            coordinator = self._coordinators.get(report.round)
            if coordinator is None:
                return Answer()
            return coordinator.receive(report, time.monotonic())

    @contextlib.contextmanager
    def locked(self, number: int) -> Iterator[Coordinator | None]:
        """Yield the coordinator of a round, which receives nothing meanwhile; `None` before its start."""
        with self._lock:
            yield self._coordinators.get(number)

    def linger(self, number: int) -> None:
        """Wait until the others have received the last decision of a round, if this launcher leaves."""
        with self._lock:
            coordinator = self._coordinators[number]
        decision, deadline = coordinator.decision, time.monotonic() + _LINGER_SECONDS
        if decision is None or not decision.is_last or 0 in decision.staying:
            return
        while not coordinator.all_have_heard and time.monotonic() < deadline:
            time.sleep(_INTERVAL)

    def close(self) -> None:
        """Stop listening."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(2.0)

    def _serve(self) -> None:
        with self._listener:
            while not self._closed.is_set():
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # the end; or no descriptor is left, which may change
                    self._closed.wait(_INTERVAL / 2)
                    continue
                if self.is_silent or not self._room.acquire(blocking=False):
                    connection.close()  # a launcher that sees this connects again
                    continue
                line = threading.Thread(
                    target=self._converse,
                    args=(connection,),
                    name="lockstep-coordinator-line",
                    daemon=True,
                )
                try:
                    line.start()
                except RuntimeError:  # no thread is left, which may change
                    self._room.release()
                    connection.close()

    def _converse(self, connection: socket.socket) -> None:
        me, caller = object(), (0, 0)
        with (
            contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError),
            connection,
        ):
            try:
                start = self._read_start(connection)
            finally:
                self._room.release()
            connection.settimeout(_IDLE_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with connection.makefile("rb") as reader:
                while line := reader.readline(LINE):
                    message, start = json.loads(start + line), b""
                    wrong = message["token"] != self.address.token
                    if wrong or self._closed.is_set() or self.is_silent:
                        break
                    if "ping" in message:
                        connection.sendall(b"{}\n")
                        continue
                    report = decode(LauncherReport, message["report"])
                    if report.index < 1:
                        break
                    caller = report.round, report.index
                    self._callers[caller] = me
                    answer = self.receive(report)
                    connection.sendall(json.dumps(asdict(answer)).encode() + b"\n")
        with self._lock:
            coordinator = self._coordinators.get(caller[0])
            if coordinator is not None and self._callers.get(caller) is me:
                coordinator.disconnect(caller[1], time.monotonic())

    def _read_start(self, connection: socket.socket) -> bytes:
        """Read the start of the first message, which shows the token, and nothing else.

        Raises:
            ValueError: if it does not.
            TimeoutError: if it takes too long, in however many pieces it comes.
        """
        start, found = self.address.start, b""
        deadline = time.monotonic() + _GREETING_SECONDS
        while len(found) < len(start):
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            connection.settimeout(left)
            part = connection.recv(len(start) - len(found))
            if not part:
                raise ValueError("no message")
            found += part
        if not hmac.compare_digest(found, start):
            raise ValueError("another token")
        return found
