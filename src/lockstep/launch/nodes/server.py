"""`CoordinatorServer`: TCP server through which launchers send reports to the coordinator on launcher 0.

Each launcher starts a server, before it is known which launcher becomes launcher 0. A coordinator serves
one rendezvous round, and still answers with its last decision after the next round has begun.
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

from lockstep.launch.nodes.coordinator import LINE, Answer, Coordinator, LauncherReport
from lockstep.world import network
from lockstep.world.rendezvous.decode import decode

_INTERVAL = 0.02
#: Seconds that launcher 0 waits at its end until all launchers have received the last decision.
_LINGER_SECONDS = 5.0
#: Seconds without a message after which a connection is closed.
_IDLE_SECONDS = 30.0
#: Maximum number of connections that have not sent the token yet; seconds that each has to send it.
_UNKNOWN, _GREETING_SECONDS = 128, 5.0
#: Seconds that a launcher has to answer at one of its addresses.
_PING_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAddress:
    """Port, addresses and access token of a launcher's `CoordinatorServer`.

    Attributes:
        token: secret that each message of a client contains.
        addresses: addresses of the launcher's host, the likeliest to be reachable first.
    """

    port: int
    token: str
    addresses: tuple[str, ...] = ()

    @property
    def start(self) -> bytes:
        """First bytes of each message, up to and including the token."""
        return json.dumps({"token": self.token}).encode()[:-1]

    def answers(self) -> bool:
        """Return whether the server answers a ping at one of its addresses."""
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
    """TCP server of a launcher; on launcher 0, it passes the launchers' reports to the coordinator.

    Args:
        loopback: whether to listen on the loopback interface alone, because all launchers are on this host.
        addresses: addresses of this host for other launchers.
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
        #: Whether to stop answering, so that the other launchers continue without this one.
        self.is_silent = False
        self._thread = threading.Thread(
            target=self._serve, name="lockstep-coordinator", daemon=True
        )
        self._thread.start()

    def begin(self, number: int, coordinator: Coordinator) -> None:
        """Pass the reports of rendezvous round `number` to this coordinator."""
        with self._lock:
            self._coordinators[number] = coordinator

    def receive(self, report: LauncherReport) -> Answer:
        """Return the coordinator's answer to a report; an empty answer before the report's round begins."""
        with self._lock:
            coordinator = self._coordinators.get(report.round)
            if coordinator is None:
                return Answer()
            return coordinator.receive(report, time.monotonic())

    @contextlib.contextmanager
    def locked(self, number: int) -> Iterator[Coordinator | None]:
        """Lock and yield the coordinator of a rendezvous round; `None` before the round begins."""
        with self._lock:
            yield self._coordinators.get(number)

    def linger(self, number: int) -> None:
        """If this launcher leaves, wait until all launchers have received the last decision."""
        with self._lock:
            coordinator = self._coordinators[number]
        decision, deadline = coordinator.decision, time.monotonic() + _LINGER_SECONDS
        if decision is None or not decision.is_last or 0 in decision.staying:
            return
        while not coordinator.all_have_heard and time.monotonic() < deadline:
            time.sleep(_INTERVAL)

    def close(self) -> None:
        """Close the listening socket and end the server's thread."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._thread.join(2.0)

    def _serve(self) -> None:
        with self._listener:
            while not self._closed.is_set():
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # closed, or out of descriptors for a moment
                    self._closed.wait(_INTERVAL / 2)
                    continue
                if self.is_silent or not self._room.acquire(blocking=False):
                    connection.close()  # the launcher then connects again
                    continue
                line = threading.Thread(
                    target=self._converse,
                    args=(connection,),
                    name="lockstep-coordinator-line",
                    daemon=True,
                )
                try:
                    line.start()
                except RuntimeError:  # out of threads for a moment
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
        """Read the first message up to its token, and check the token before reading more.

        Raises:
            ValueError: if the token is wrong.
            TimeoutError: if the client takes more than a few seconds to send it.
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
