"""`CoordinatorServer`: TCP server through which launchers send reports to the coordinator on launcher 0.

Each launcher starts a server, before it is known which launcher becomes launcher 0. A coordinator serves
one rendezvous round, and still answers with its last decision after the next round has begun.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial

from lockstep.launch.nodes.coordinator import Coordinator
from lockstep.launch.nodes.lines import READ, LineReader, Waker
from lockstep.launch.nodes.messages import LINE, Answer, LauncherReport
from lockstep.world import network
from lockstep.world.rendezvous.decode import decode

_INTERVAL = 0.02
#: Seconds that launcher 0 waits at its end until all launchers have received the last decision.
_LINGER_SECONDS = 5.0
#: Seconds without a message after which a connection is closed.
_IDLE_SECONDS = 30.0
#: Maximum number of connections that have not sent the token yet; seconds that each has to send it.
_UNKNOWN, _GREETING_SECONDS = 128, 5.0
#: Seconds between two searches for connections to close.
_SWEEP_SECONDS = 1.0
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

    One thread serves all connections. It answers each report, and sends a further answer to each launcher
    whose answer has changed.

    Args:
        loopback: whether to listen on the loopback interface alone, because all launchers are on this host.
        addresses: addresses of this host for other launchers.
    """

    def __init__(self, *, loopback: bool, addresses: tuple[str, ...] = (network.LOOPBACK,)) -> None:
        self._coordinators: dict[int, Coordinator] = {}
        self._lock = threading.Lock()
        #: Reports of rounds that this launcher has not begun yet.
        self._early: dict[tuple[int, int], LauncherReport] = {}
        #: All connections; those without a token yet; and those of launchers, by round and index.
        self._connections, self._unknown = set[_Connection](), set[_Connection]()
        self._launchers: dict[tuple[int, int], _Connection] = {}
        #: Number of changes of a round's answers that the launchers have received.
        self._sent: dict[int, int] = {}
        self._encoded: tuple[Answer | None, bytes] = None, b""
        self._listener = network.listen(0, loopback=loopback)
        self._listener.setblocking(False)
        self._waker, self._selector = Waker(), selectors.DefaultSelector()
        self._closed = threading.Event()
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
            for launcher in [one for one in self._early if one[0] == number]:
                with contextlib.suppress(KeyError):  # a launcher that takes no part
                    coordinator.receive(self._early.pop(launcher), time.monotonic())

    def receive(self, report: LauncherReport) -> Answer:
        """Return the coordinator's answer to a report; an empty answer before the report's round begins."""
        with self.locked(report.round) as coordinator:
            if coordinator is None:
                self._early[report.round, report.index] = report
                return Answer(generation=report.generation)
            return coordinator.receive(report, time.monotonic())

    @contextlib.contextmanager
    def locked(self, number: int) -> Iterator[Coordinator | None]:
        """Context manager: lock and yield the coordinator of rendezvous round `number`.

        It yields `None` before the round begins. If the coordinator's answers have changed when the context
        ends, they are sent to the other launchers.
        """
        with self._lock:
            coordinator = self._coordinators.get(number)
            yield coordinator
        if coordinator is not None and coordinator.changes != self._sent.get(number):
            self._waker.wake()

    def linger(self, number: int) -> None:
        """Wait up to 5 s until all launchers have received the last decision of round `number`.

        There is no wait if launcher 0 takes part in the next round.
        """
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
        self._waker.wake()
        self._thread.join(2.0)

    def _serve(self) -> None:
        with self._selector as selector, self._listener, contextlib.closing(self._waker):
            selector.register(self._listener, selectors.EVENT_READ, self._accept)
            selector.register(self._waker.reader, selectors.EVENT_READ, self._waker.clear)
            swept = time.monotonic()
            while not self._closed.is_set():
                for key, _ in selector.select(_SWEEP_SECONDS if self._connections else None):
                    key.data()
                self._send_changes()
                if (now := time.monotonic()) - swept > _SWEEP_SECONDS:
                    swept = now
                    self._close_idle(now)
            for connection in tuple(self._connections):
                self._drop(connection)

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except BlockingIOError:
            return
        except OSError:  # out of descriptors for a moment
            self._closed.wait(_INTERVAL / 2)
            return
        if self.is_silent or len(self._unknown) >= _UNKNOWN:
            accepted.close()  # the launcher then connects again
            return
        connection = _Connection(accepted, self.address.start)
        self._connections.add(connection)
        self._unknown.add(connection)
        self._selector.register(
            accepted, selectors.EVENT_READ, partial(self._serve_one, connection)
        )

    def _serve_one(self, connection: _Connection) -> None:
        """Send the unsent rest of earlier answers on a connection, and answer the reports that arrive."""
        try:
            connection.flush()
            lines = connection.read()
            if connection.known:
                self._unknown.discard(connection)
            for line in lines:
                self._answer(connection, line)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            self._drop(connection)
        else:
            self._await(connection)

    def _answer(self, connection: _Connection, line: bytes) -> None:
        message = json.loads(line)
        if message["token"] != self.address.token or self.is_silent:
            raise ValueError("another token, or no answers")
        if "ping" in message:
            connection.send(b"{}\n")
            return
        report = decode(LauncherReport, message["report"])
        if report.index < 1:
            raise ValueError("launcher 0 has no connection to itself")
        answer = self.receive(report)
        launcher = report.round, report.index
        if connection.launcher not in (None, launcher):
            raise ValueError("a connection of two launchers")
        connection.launcher, connection.answer = launcher, answer
        self._launchers[launcher] = connection
        connection.send(self._encode(answer))

    def _encode(self, answer: Answer) -> bytes:
        """Return an answer as a line of JSON; the line of the last answer is cached."""
        if self._encoded[0] is not answer:
            self._encoded = answer, json.dumps(asdict(answer)).encode() + b"\n"
        return self._encoded[1]

    def _send_changes(self) -> None:
        """Send the current answer to each launcher that received a different one before."""
        for number, coordinator in tuple(self._coordinators.items()):
            if self.is_silent or coordinator.changes == self._sent.get(number):
                continue
            with self._lock:
                self._sent[number] = coordinator.changes
                changed = [
                    (connection, answer)
                    for (round_, index), connection in self._launchers.items()
                    if round_ == number
                    and index < coordinator.count
                    and (answer := coordinator.answer(index)) is not connection.answer
                ]
            for connection, answer in changed:
                self._send_change(connection, answer)

    def _send_change(self, connection: _Connection, answer: Answer) -> None:
        if answer != connection.answer:
            try:
                connection.send(self._encode(answer))
            except OSError:
                return self._drop(connection)
            self._await(connection)
        connection.answer = answer
        return None

    def _await(self, connection: _Connection) -> None:
        """Set the events to wait for on a connection: data to read, and room for unsent data if any."""
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if connection.events != events:
            connection.events = events
            serve = partial(self._serve_one, connection)
            self._selector.modify(connection.socket, events, serve)

    def _close_idle(self, now: float) -> None:
        for connection in tuple(self._connections):
            longest = _IDLE_SECONDS if connection.known else _GREETING_SECONDS
            if now - connection.active > longest:
                self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        """Close a connection.

        If a launcher reported on it, the coordinator is told: the launcher counts as lost unless it
        connects again within a few seconds.
        """
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._connections.discard(connection)
        self._unknown.discard(connection)
        launcher = connection.launcher
        if launcher is None or self._launchers.get(launcher) is not connection:
            return
        del self._launchers[launcher]
        with self._lock:
            coordinator = self._coordinators.get(launcher[0])
            if coordinator is not None:
                coordinator.disconnect(launcher[1], time.monotonic())


class _Connection:
    """A connection of the server, with the pieces of messages that are not complete yet.

    Attributes:
        known: whether the client has sent the token.
        launcher: round and index of the launcher that reports on this connection.
        answer: the last answer that was sent to the launcher.
        active: time of the last message; before the token arrives, time at which the connection was made.
        events: mask of `selectors.EVENT_READ` and `EVENT_WRITE` for which the server waits.
        unsent: parts of answers that the socket has not accepted yet.
    """

    __slots__ = (
        *("_first", "_reader", "_start", "active", "answer"),
        *("events", "known", "launcher", "socket", "unsent"),
    )

    def __init__(self, accepted: socket.socket, start: bytes) -> None:
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket, self._start, self._first = accepted, start, b""
        self._reader, self.unsent = LineReader(), list[memoryview]()
        self.known, self.active = False, time.monotonic()
        self.launcher: tuple[int, int] | None = None
        self.answer: Answer | None = None
        self.events = selectors.EVENT_READ

    def read(self) -> list[bytes]:
        """Return the messages that have arrived completely.

        Raises:
            ValueError: if the first bytes are not the token.
            ConnectionError: if the client has closed the connection.
        """
        try:
            data = self.socket.recv(READ)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionAbortedError
        if not self.known:
            data = self._first = self._first + data
            if len(data) < len(self._start):
                return []
            if not hmac.compare_digest(data[: len(self._start)], self._start):
                raise ValueError("another token")
            self.known, self._first = True, b""
        self.active = time.monotonic()
        return self._reader.feed(data)

    def send(self, data: bytes) -> None:
        """Send as much of `data` as the socket accepts without blocking, and keep the rest for `flush`."""
        self.unsent.append(memoryview(data))
        self.flush()

    def flush(self) -> None:
        """Send as much of the unsent data as the socket accepts without blocking."""
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                sent = self.socket.send(self.unsent[0])
                self.unsent[0] = self.unsent[0][sent:]
                if not self.unsent[0]:
                    del self.unsent[0]
