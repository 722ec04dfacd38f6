"""Event loop of a parameter server: one thread serves the connections of all workers."""

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

from lockstep.engine.parameter_server.connection import BrokenError, Connection, Pool
from lockstep.engine.parameter_server.discovery import proof
from lockstep.engine.parameter_server.messages import Kind, Message, megabytes
from lockstep.engine.parameter_server.model_workers import ModelWorkers

#: Most unauthenticated connections at a time; the listener accepts no further ones meanwhile.
_MOST_UNKNOWN = 128
#: Seconds within which a new connection must authenticate itself.
_GREETING_SECONDS = 10.0
#: Seconds without new connections after the system had no descriptor or memory for one.
_PAUSE = 0.5
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


class Server:
    """A parameter server: accepts, authenticates and serves the workers of a launch.

    Args:
        listener: the socket at which workers connect.
        token: the secret of the launch.
    """

    def __init__(self, listener: socket.socket, token: str) -> None:
        listener.setblocking(False)
        self._listener, self._token = listener, token
        self._pool = Pool()
        self._models: dict[str, ModelWorkers] = {}
        self._workers: dict[Connection, ModelWorkers] = {}
        self._unknown: dict[
            Connection, tuple[str, float]
        ] = {}  # nonce, and deadline to authenticate
        self._paused_until = 0.0  # time until which the listener is not polled
        self._accepts = True  # whether the listener is polled
        self._writing: set[Connection] = set()
        self._selector = selectors.DefaultSelector()
        self._wake, self._waker = socket.socketpair()
        for one in (listener, self._wake):
            one.setblocking(False)
            self._selector.register(one, _READ)
        self._ending = False
        self._moved = [0, 0]  # bytes received and sent by connections that are closed

    def end(self) -> None:
        """Make `run` return as soon as no worker is connected; a signal handler may call this."""
        self._ending = True
        with contextlib.suppress(OSError):  # the pipe is full, or closed
            self._waker.send(b"\0")

    @property
    def traffic(self) -> str:
        """Megabytes received and sent over all connections so far, as text."""
        into, out = self._count()
        return f"{megabytes(into)} in, {megabytes(out)} out"

    def run(self) -> None:
        """Serve workers until `end` is called and all workers have disconnected."""
        while not self._ending or self._workers:
            for key, events in self._selector.select(self._timeout()):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, Connection):
                    self._read_and_write(key.fileobj, events)
                else:
                    self._wake.recv(64)
            for connection in self._workers:
                if connection.has_output != (connection in self._writing):
                    wants = _READ | _WRITE if connection.has_output else _READ
                    self._selector.modify(connection, wants)
                    self._writing ^= {connection}
            # Only after all connections that `select` returned, since this may close some.
            self._check_unknown()
        self._selector.close()
        for connection in self._unknown:
            connection.close()
        for one in (self._listener, self._wake, self._waker):
            one.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
            connection = Connection(accepted, self._pool)
        except (BlockingIOError, ConnectionError):
            return  # the client has closed it
        except OSError:  # EMFILE, ENFILE, ENOBUFS, ENOMEM: for some time
            self._paused_until = time.monotonic() + _PAUSE
            return
        nonce = secrets.token_hex(16)
        self._unknown[connection] = nonce, time.monotonic() + _GREETING_SECONDS
        connection.send(Kind.CHALLENGE, meta={"nonce": nonce})
        self._selector.register(connection, _READ)

    def _timeout(self) -> float | None:
        """Return the seconds until `_check_unknown` must be called; `None` if there is no need.

        The call is due at the next deadline of an unauthenticated connection, or at the end of a pause.
        """
        due = [until for _, until in self._unknown.values()]
        if not self._accepts and len(self._unknown) < _MOST_UNKNOWN:
            due.append(self._paused_until)
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _check_unknown(self) -> None:
        """Close connections that took too long to authenticate; begin or end to accept new ones.

        None are accepted for `_PAUSE` seconds after the system had no descriptor or memory for one, and
        while `_MOST_UNKNOWN` are unauthenticated.
        """
        now = time.monotonic()
        for connection in [c for c, (_, until) in self._unknown.items() if until <= now]:
            self._drop(connection, BrokenError("it has not shown the token"))
        accepts = self._paused_until <= now and len(self._unknown) < _MOST_UNKNOWN
        if accepts and not self._accepts:
            self._selector.register(self._listener, _READ)
        elif self._accepts and not accepts:
            self._selector.unregister(self._listener)
        self._accepts = accepts

    def _read_and_write(self, connection: Connection, events: int) -> None:
        try:
            if events & _WRITE:
                connection.write()
            if events & _READ:
                connection.read(self._handle)
        except BrokenError as error:
            self._drop(connection, error)

    def _handle(self, connection: Connection, message: Message) -> None:
        if connection in self._unknown:
            self._authenticate(connection, message.meta)
        elif message.header.kind == Kind.TRAFFIC:
            into, out = self._count()
            connection.send(Kind.TRAFFIC, meta={"in": into, "out": out})
        else:
            self._workers[connection].handle(connection, message)

    def _authenticate(self, connection: Connection, meta: dict[str, Any]) -> None:
        """Check that a worker has the launch's secret, and register the worker with its model.

        `meta`: the JSON of the worker's first message: its proof, model, rank, and number of threads.

        Raises:
            BrokenError: if the proof is wrong.
        """
        nonces = (self._unknown[connection][0], str(meta.get("nonce")))
        shown = str(meta.get("proof")).encode(errors="replace")
        # No other part of the message is read before.
        if not hmac.compare_digest(shown, proof(self._token, "worker", nonces).encode()):
            raise BrokenError("it does not belong to this launch")
        del self._unknown[connection]
        torch.set_num_threads(meta["threads"])
        name, size, replicas = meta["model"], meta["size"], meta["replicas"]
        model = self._models.setdefault(name, ModelWorkers(size, replicas, self._pool))
        connection.rank = meta["rank"]
        self._workers[connection] = model
        connection.send(Kind.WELCOME, meta={"proof": proof(self._token, "server", nonces)})
        model.join(connection)

    def _drop(self, connection: Connection, why: BrokenError) -> None:
        model = self._workers.pop(connection, None)
        self._unknown.pop(connection, None)
        self._writing.discard(connection)
        self._selector.unregister(connection)
        self._moved[0] += connection.received
        self._moved[1] += connection.sent
        connection.close()
        name = "a connection without the token" if model is None else f"rank {connection.rank}"
        if not connection.has_left:
            sys.stderr.write(f"lockstep: server: {name} is gone: {why}\n")
        if model is not None:
            model.leave(connection)
            if model.is_empty:
                self._models = {name: m for name, m in self._models.items() if m is not model}

    def _count(self) -> tuple[int, int]:
        connected = [*self._workers, *self._unknown]
        into = self._moved[0] + sum(connection.received for connection in connected)
        return into, self._moved[1] + sum(connection.sent for connection in connected)
