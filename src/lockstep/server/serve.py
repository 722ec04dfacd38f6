"""The server's loop: one thread, many connections, nothing that waits for a single worker."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import selectors
import socket
import sys
import time
from typing import Any

import torch

from lockstep.exchange.frames import Kind
from lockstep.exchange.links import megabytes
from lockstep.server.connection import BrokenError, Connection, Frame
from lockstep.server.memory import Pool
from lockstep.server.room import Room
from lockstep.world.port_discovery import NO_ROOM
from lockstep.world.servers import proof

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
#: Seconds that a guest has to say who it is; workers do as soon as they are connected.
GREETING_SECONDS = 10.0
#: Guests at a time that have not said it yet; others wait until the system lets them in.
GUESTS = 128
#: Seconds without new connections where the system has no room for one more.
_PAUSE = 0.5


class Server:
    """Serves the workers of a launch.

    Args:
        listener: where they come.
        token: what they know, and this server.
    """

    def __init__(self, listener: socket.socket, token: str) -> None:
        listener.setblocking(False)
        self._listener, self._token = listener, token
        self._pool = Pool()
        self._rooms: dict[str, Room] = {}
        self._homes: dict[Connection, Room | None] = {}
        self._guests: dict[Connection, float] = {}  # until when they may say who they are
        self._nonces: dict[Connection, str] = {}  # what guests are to prove themselves with
        self._closed_until: float | None = None  # when the door opens again; None while it is open
        self._writing: set[Connection] = set()
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, _READ)
        self._wake, self._waker = socket.socketpair()
        for end in (self._wake, self._waker):
            end.setblocking(False)
        self._selector.register(self._wake, _READ)
        self._ending = False
        self._moved = [0, 0]  # by connections that have ended

    def end(self) -> None:
        """End as soon as no worker is connected; may be called by a signal's handler."""
        self._ending = True
        with contextlib.suppress(OSError):  # it is awake already, or has ended
            self._waker.send(b"\0")

    @property
    def traffic(self) -> str:
        """What has gone in and out, in words."""
        into, out = self._count()
        return f"{megabytes(into)} in, {megabytes(out)} out"

    def run(self) -> None:
        """Serve until `end` is called and all workers have left."""
        # Guests who have not said who they are keep nobody up.
        while not self._ending or any(room is not None for room in self._homes.values()):
            for key, events in self._selector.select(self._patience()):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, Connection):
                    self._attend(key.fileobj, events)
                else:
                    self._wake.recv(64)
            self._watch_output()
            self._watch_guests()
        self._selector.close()
        for guest in self._homes:
            guest.close()
        for one in (self._listener, self._wake, self._waker):
            one.close()

    # --- guests ----------------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it has thought better of it
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            self._close_door(_PAUSE)
            return
        try:
            connection = Connection(accepted, self._pool)
        except OSError:
            accepted.close()  # it is gone already
            return
        self._homes[connection] = None
        self._guests[connection] = time.monotonic() + GREETING_SECONDS
        self._nonces[connection] = secrets.token_hex(16)
        connection.send(Kind.CHALLENGE, meta={"nonce": self._nonces[connection]})
        self._selector.register(connection, _READ)
        if self._is_full:
            self._close_door(0.0)

    @property
    def _is_full(self) -> bool:
        return len(self._guests) >= GUESTS

    def _close_door(self, seconds: float) -> None:
        self._closed_until = time.monotonic() + seconds
        self._selector.unregister(self._listener)

    def _patience(self) -> float | None:
        """Return for how long nothing but what others send needs attention."""
        due = list(self._guests.values())
        if self._closed_until is not None and not self._is_full:
            due.append(self._closed_until)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _watch_guests(self) -> None:
        """Part with those who do not say who they are, and let others in when there is room."""
        now = time.monotonic()
        for guest in [one for one, until in self._guests.items() if until <= now]:
            self._part(guest, BrokenError("it does not say who it is"))
        if self._closed_until is not None and now >= self._closed_until and not self._is_full:
            self._closed_until = None
            self._selector.register(self._listener, _READ)

    # --- those who are there ---------------------------------------------------------------------

    def _attend(self, connection: Connection, events: int) -> None:
        try:
            if events & _WRITE:
                connection.write()
            if events & _READ:
                connection.read(self._hear)
        except BrokenError as error:
            self._part(connection, error)

    def _watch_output(self) -> None:
        """Ask to be told of room for those to whom something is still to be sent."""
        for connection in self._homes:
            if connection.has_output != (connection in self._writing):
                wants = _READ | _WRITE if connection.has_output else _READ
                self._selector.modify(connection, wants)
                self._writing ^= {connection}

    def _hear(self, connection: Connection, frame: Frame) -> None:
        room = self._homes[connection]
        if room is None:
            self._greet(connection, frame.meta)
        elif frame.header.kind == Kind.COUNT:
            into, out = self._count()
            connection.send(Kind.COUNT, meta={"in": into, "out": out})
        else:
            room.hear(connection, frame)

    def _greet(self, connection: Connection, meta: dict[str, Any]) -> None:
        """Let a worker in that proves that it knows the token."""
        nonces = (self._nonces[connection], str(meta.get("nonce")))
        shown = str(meta.get("proof")).encode(errors="replace")
        # Before anything else is looked at.
        if not hmac.compare_digest(shown, proof(self._token, "worker", nonces).encode()):
            raise BrokenError("it does not belong to this launch")
        try:
            name = str(meta["room"])
            rank, size, replicas = int(meta["rank"]), int(meta["size"]), int(meta["replicas"])
            threads = int(meta["threads"])
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise BrokenError("it does not say who it is") from error
        if not 0 <= rank < size <= replicas or threads < 1:
            raise BrokenError("it says what cannot be")
        connection.rank = rank
        del self._guests[connection], self._nonces[connection]
        torch.set_num_threads(threads)
        room = self._rooms.setdefault(name, Room(size, replicas, self._pool))
        self._homes[connection] = room
        room.enter(connection, proof(self._token, "server", nonces))

    def _part(self, connection: Connection, why: BrokenError) -> None:
        room = self._homes.pop(connection)
        self._guests.pop(connection, None)
        self._nonces.pop(connection, None)
        self._writing.discard(connection)
        self._selector.unregister(connection)
        self._moved[0] += connection.received
        self._moved[1] += connection.sent
        connection.close()
        who = "a guest" if room is None else f"rank {connection.rank}"
        if not connection.has_left:
            sys.stderr.write(f"lockstep: server: {who} is gone: {why}\n")
        if room is not None:
            room.leave(connection)
            if room.is_empty:
                self._rooms = {name: one for name, one in self._rooms.items() if one is not room}

    def _count(self) -> tuple[int, int]:
        into = self._moved[0] + sum(one.received for one in self._homes)
        return into, self._moved[1] + sum(one.sent for one in self._homes)
