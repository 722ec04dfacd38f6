"""Server of the coordinator on launcher 0, with one connection for each launcher."""

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
from lockstep.launch.nodes.membership import Membership
from lockstep.launch.nodes.messages import Answer, Said
from lockstep.world import network

_INTERVAL = 0.02
#: How long launcher 0 waits for the others to hear the last decision, before it ends.
_LINGER_SECONDS = 5.0
#: How long it continues telling it, where it does not end.
_AFTERLIFE_SECONDS = 20.0
#: A line over which nothing comes for as long is not used any more.
_IDLE_SECONDS = 30.0
#: Connections at a time that have not shown the token yet, and how long each may take to.
_UNKNOWN, _GREETING_SECONDS = 128, 5.0
#: The longest message, in bytes.
LINE = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where launcher 0 listens, and what shows that a caller belongs to the launch."""

    port: int
    token: str

    @property
    def start(self) -> bytes:
        """How each message of a caller begins: `json.dumps` keeps the order, and the token is first."""
        return json.dumps({"token": self.token}).encode()[:-1]

    def answers(self, address: str, seconds: float) -> bool:
        """Return whether launcher 0 can be reached at an address, and lives."""
        ping = json.dumps({"token": self.token, "ping": True})
        try:
            with (
                socket.create_connection((address, self.port), seconds) as line,
                line.makefile("rb") as reader,
            ):
                line.sendall(ping.encode() + b"\n")
                return bool(reader.readline(LINE))
        except OSError:
            return False


class CoordinatorServer:
    """Where launcher 0 listens to the others.

    Args:
        membership: the launchers and their ranks.
        coordinator: what decides.
        loopback: whether all of them are on this host, and always will be.
    """

    def __init__(self, membership: Membership, coordinator: Coordinator, *, loopback: bool) -> None:
        self._membership = membership
        self._coordinator = coordinator
        self._lock = threading.Lock()
        self._callers: dict[int, object] = {}
        self._listener = network.listen(0, loopback=loopback)
        self._listener.settimeout(_INTERVAL)
        self._closed = threading.Event()
        self._room = threading.BoundedSemaphore(_UNKNOWN)
        self.place = Place(port=self._listener.getsockname()[1], token=secrets.token_hex(16))
        self._thread = threading.Thread(
            target=self._serve, name="lockstep-coordinator", daemon=True
        )
        self._thread.start()

    def hear(self, said: Said) -> Answer:
        """Take what a launcher says, and answer it."""
        with self._lock:
            return self._coordinator.hear(said, time.monotonic())

    @contextlib.contextmanager
    def locked(self) -> Iterator[Coordinator]:
        """Give the coordinator, which hears nothing meanwhile."""
        with self._lock:
            yield self._coordinator

    def close(self) -> None:
        """Leave when the others have the last decision; launchers that continue don't wait for it."""
        decision = self._coordinator.decision
        if decision is None or not decision.is_last:
            self._closed.set()
        elif 0 in decision.staying:
            timer = threading.Timer(_AFTERLIFE_SECONDS, self._closed.set)
            timer.daemon = True
            timer.start()
            return
        else:
            deadline = time.monotonic() + _LINGER_SECONDS
            while not self._have_all_heard() and time.monotonic() < deadline:
                time.sleep(_INTERVAL)
            self._closed.set()
        self._thread.join(2.0)

    def _have_all_heard(self) -> bool:
        with self._lock:
            return len(self._coordinator.readers | {0}) == self._membership.count

    def _serve(self) -> None:
        with self._listener:
            while not self._closed.is_set():
                with self._lock:
                    self._coordinator.look(time.monotonic())
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # no caller for now; or no descriptor is left, which may change
                    self._closed.wait(_INTERVAL / 2)
                    continue
                if not self._room.acquire(blocking=False):
                    connection.close()  # a launcher that sees this connects again
                    continue
                threading.Thread(
                    target=self._converse,
                    args=(connection,),
                    name="lockstep-coordinator-line",
                    daemon=True,
                ).start()

    def _converse(self, connection: socket.socket) -> None:
        me, index = object(), -1
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
                    told, start = json.loads(start + line), b""
                    if self._closed.is_set() or told["token"] != self.place.token:
                        break
                    if "ping" in told:
                        connection.sendall(b"{}\n")
                        continue
                    said = Said.parse(told["said"])
                    if not 0 < said.index < self._membership.count:
                        break
                    index = said.index
                    self._callers[index] = me
                    answer = self.hear(said)
                    connection.sendall(json.dumps(asdict(answer)).encode() + b"\n")
        if index > 0 and self._callers.get(index) is me:
            with self._lock:
                self._coordinator.hang_up(index, time.monotonic())

    def _read_start(self, connection: socket.socket) -> bytes:
        """Read the start of the first message, which shows the token, and nothing else.

        Raises:
            ValueError: if it does not.
            TimeoutError: if it takes too long, in however many pieces it comes.
        """
        start, found = self.place.start, b""
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
