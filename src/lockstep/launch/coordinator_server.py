"""Where launcher 0 listens to the others, a line for each, and the chair answers."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass

from lockstep.launch.coordinator import Answer, Coordinator, Said
from lockstep.launch.membership import Membership
from lockstep.world import port_discovery

_INTERVAL = 0.02
#: How long launcher 0 waits for the others to hear the last decision, before it ends.
_LINGER_SECONDS = 5.0
#: How long it goes on telling it, where it does not end.
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

    def spell(self) -> str:
        """Return it as text."""
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> Place:
        """Read what `spell` has made."""
        return Place(**json.loads(text))

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
        roster: who they are.
        head: what decides.
        loopback: whether all of them are on this host, and always will be.
    """

    def __init__(self, roster: Membership, head: Coordinator, *, loopback: bool) -> None:
        self._roster = roster
        self._chair = head
        self._lock = threading.Lock()
        self._callers: dict[int, object] = {}
        self._listener = port_discovery.listen(0, loopback=loopback)
        self._listener.settimeout(_INTERVAL)
        self._closed = threading.Event()
        self._room = threading.BoundedSemaphore(_UNKNOWN)
        self.place = Place(port=self._listener.getsockname()[1], token=secrets.token_hex(16))
        self._thread = threading.Thread(target=self._serve, name="lockstep-chair", daemon=True)
        self._thread.start()

    def hear(self, said: Said) -> Answer:
        """Take what a launcher says, and answer it."""
        with self._lock:
            return self._chair.hear(said, time.monotonic())

    def enter(self, generation: int) -> None:
        """Begin another generation."""
        with self._lock:
            self._chair.enter(generation)

    @property
    def all_entered(self) -> bool:
        """Whether all launchers are in this generation."""
        with self._lock:
            return self._chair.all_entered

    def open(self, port: int) -> None:
        """Tell all launchers the port of this generation's store."""
        with self._lock:
            self._chair.open(port)

    def welcome(self, names: tuple[str, ...]) -> None:
        """Note who wants to take part."""
        with self._lock:
            self._chair.welcome(names)

    def lose(self, index: int) -> None:
        """Note that a launcher cannot reach this one any more."""
        with self._lock:
            self._chair.lose(index, time.monotonic())

    def supersede(self) -> None:
        """Note that others have begun another round without this launcher."""
        with self._lock:
            self._chair.supersede()

    def close(self) -> None:
        """Leave when the others have heard the last decision; who goes on need not wait for that."""
        decision = self._chair.decision
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
            return len(self._chair.readers | {0}) == self._roster.count

    def _serve(self) -> None:
        with self._listener:
            while not self._closed.is_set():
                with self._lock:
                    self._chair.look(time.monotonic())
                try:
                    connection, _ = self._listener.accept()
                except OSError:  # nobody for now; or no descriptor is left, which may change
                    self._closed.wait(_INTERVAL / 2)
                    continue
                if not self._room.acquire(blocking=False):
                    connection.close()  # a launcher that meets with this calls again
                    continue
                threading.Thread(
                    target=self._converse,
                    args=(connection,),
                    name="lockstep-chair-line",
                    daemon=True,
                ).start()

    def _converse(self, connection: socket.socket) -> None:
        me, index = object(), -1
        with (
            contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError),
            contextlib.ExitStack() as unknown,
        ):
            unknown.callback(self._room.release)
            connection.settimeout(_GREETING_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with connection, connection.makefile("rb") as reader:
                while line := reader.readline(LINE):
                    told = json.loads(line)
                    if self._closed.is_set() or told["token"] != self.place.token:
                        break
                    unknown.close()
                    connection.settimeout(_IDLE_SECONDS)
                    if "ping" in told:
                        connection.sendall(b"{}\n")
                        continue
                    said = Said.parse(told["said"])
                    if not 0 < said.index < self._roster.count:
                        break
                    index = said.index
                    self._callers[index] = me
                    answer = self.hear(said)
                    connection.sendall(json.dumps(answer.plain()).encode() + b"\n")
        if index > 0 and self._callers.get(index) is me:
            with self._lock:
                self._chair.hang_up(index, time.monotonic())
