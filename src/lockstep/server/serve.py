"""The server's loop: one thread, many connections, nothing that waits for a single worker."""

from __future__ import annotations

import contextlib
import hmac
import selectors
import socket
import sys
from typing import Any

import torch

from lockstep.exchange.frames import Kind
from lockstep.exchange.links import megabytes
from lockstep.server.connection import BrokenError, Connection, Frame
from lockstep.server.memory import Pool
from lockstep.server.room import Room

_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Server:
    """Serves the workers of a launch.

    Args:
        listener: where they come.
        token: what they know.
    """

    def __init__(self, listener: socket.socket, token: str) -> None:
        listener.setblocking(False)
        self._listener, self._token = listener, token
        self._pool = Pool()
        self._rooms: dict[str, Room] = {}
        self._homes: dict[Connection, Room | None] = {}
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
            for key, events in self._selector.select():
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, Connection):
                    self._attend(key.fileobj, events)
                else:
                    self._wake.recv(64)
            self._watch_output()
        self._selector.close()
        for guest in self._homes:
            guest.close()
        for one in (self._listener, self._wake, self._waker):
            one.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):
            return  # it has thought better of it
        connection = Connection(accepted, self._pool)
        self._homes[connection] = None
        self._selector.register(connection, _READ)

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
        """Let a worker in that knows the token."""
        try:
            token, name = str(meta["token"]), str(meta["room"])
            rank, size, replicas = int(meta["rank"]), int(meta["size"]), int(meta["replicas"])
            threads = int(meta["threads"])
        except (KeyError, TypeError, ValueError) as error:
            raise BrokenError("it does not say who it is") from error
        if not hmac.compare_digest(token.encode(), self._token.encode()):
            raise BrokenError("it does not belong to this launch")
        if not 0 <= rank < size <= replicas or threads < 1:
            raise BrokenError("it says what cannot be")
        connection.rank = rank
        torch.set_num_threads(threads)
        room = self._rooms.setdefault(name, Room(size, replicas, self._pool))
        self._homes[connection] = room
        room.enter(connection)

    def _part(self, connection: Connection, why: BrokenError) -> None:
        room = self._homes.pop(connection)
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
