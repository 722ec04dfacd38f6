"""Non-blocking connection of a server to one worker, and memory for its messages."""

from __future__ import annotations

import os
import socket
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from lockstep.engine.parameter_server.messages import (
    HEADER,
    LONGEST_HELLO,
    PIECES,
    Header,
    Kind,
    Message,
    parse,
    pieces,
    view,
)

#: Bytes of memory of this machine: longer messages are rejected.
_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
#: Bytes that the server reads from one worker before it reads from the next one.
_TURN = 1 << 24


class BrokenError(Exception):
    """A worker's connection has ended, or the worker has sent an invalid message."""


class Pool:
    """Tensors for messages, reused for later messages of the same size, since new memory pages are slow."""

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = defaultdict(list)

    def take(self, size: int) -> torch.Tensor:
        """Return a CPU tensor of `size` bytes: one that was put back, or a new one."""
        free = self._free[size]
        return free.pop() if free else torch.empty(size, dtype=torch.uint8)

    def give(self, memory: torch.Tensor) -> None:
        """Put `memory`, a tensor that `take` returned, back into the pool."""
        self._free[memory.numel()].append(memory)

    def shared(self, memory: torch.Tensor, references: int) -> Callable[[], None]:
        """Return a function that, when called for the last of `references` times, frees `memory`.

        The tensor `memory` is put back into the pool. It is shared by several messages, each of which calls
        the function once it is sent.
        """
        left = references

        def release() -> None:
            nonlocal left
            left -= 1
            if not left:
                self.give(memory)

        return release


class Connection:
    """A server's connection to one worker.

    Attributes:
        rank: rank of the worker; -1 before it has authenticated itself.
        has_left: whether the worker has sent its last message.
    """

    def __init__(self, connection: socket.socket, pool: Pool) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket, self._pool = connection, pool
        self._incoming = self._messages()
        self._outgoing: deque[tuple[memoryview, Callable[[], None] | None]] = deque()
        self.rank, self.has_left = -1, False
        self.received = self.sent = 0
        self._wanted = next(self._incoming)

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def has_output(self) -> bool:
        """Whether messages wait to be sent."""
        return bool(self._outgoing)

    # --- receiving ---------------------------------------------------------------------------------

    def read(self, handle: Callable[[Connection, Message], None]) -> None:
        """Receive at most 16 MB without blocking, and call `handle` with each complete message.

        Raises:
            BrokenError: if the connection is closed, or the worker has sent an invalid message.
        """
        left = _TURN
        while left > 0 and isinstance(self._wanted, memoryview):
            try:
                count = self._socket.recv_into(self._wanted)
            except BlockingIOError:
                return
            except OSError as error:
                raise BrokenError(str(error)) from error
            if not count:
                raise BrokenError("it closed its connection")
            left -= count
            self.received += count
            self._wanted = self._wanted[count:]
            while isinstance(self._wanted, memoryview) and not self._wanted:
                self._wanted = next(self._incoming)  # nothing is read for an empty part
                if isinstance(self._wanted, Message):
                    handle(self, self._wanted)
                    self._wanted = next(self._incoming)

    def _messages(self) -> Iterator[memoryview | Message]:
        """Yield memory for the next bytes to receive, and each message once it is complete.

        The caller fills the memory before it advances this generator.
        """
        while True:
            head = bytearray(HEADER.size)
            yield memoryview(head)
            header = Header.unpack(head)
            is_hello = header.kind == Kind.HELLO and not header.payload
            if self.rank < 0 and not (is_hello and header.meta <= LONGEST_HELLO):
                raise BrokenError("it does not speak like a worker")
            if header.payload > _MEMORY:
                raise BrokenError(f"it is about to send {header.payload} bytes")
            text = bytearray(header.meta)
            yield memoryview(text)
            payload = self._pool.take(header.payload)
            yield view(payload)
            try:
                yield Message(header, parse(text), payload)
            except (ValueError, RecursionError) as error:
                raise BrokenError(f"JSON that is none: {error}") from error

    # --- sending -----------------------------------------------------------------------------------

    def send(
        self,
        kind: Kind,
        tensors: Sequence[torch.Tensor] = (),
        *,
        release: Callable[[], None] | None = None,
        **fields: Any,
    ) -> None:
        """Begin to send a message without blocking; later calls of `write` send what remains.

        Args:
            kind: kind of the message.
            tensors: contents of the message; they must not change before they are sent.
            release: function that is called once the message is sent, or the connection is closed.
            fields: other arguments of `messages.pieces`.
        """
        *first, last = pieces(kind, tensors, **fields)
        self._outgoing += [(piece, None) for piece in first]
        self._outgoing.append((last, release))
        self.write()

    def write(self) -> None:
        """Send the bytes of waiting messages, as far as possible without blocking."""
        while self._outgoing:
            views = [self._outgoing[i][0] for i in range(min(len(self._outgoing), PIECES))]
            try:
                count = self._socket.sendmsg(views)
            except BlockingIOError:
                return
            except OSError:
                self._drop_all()  # the worker has ended: `read` will raise an error
                return
            self.sent += count
            while self._outgoing and count >= self._outgoing[0][0].nbytes:
                done, release = self._outgoing.popleft()
                count -= done.nbytes
                if release is not None:
                    release()
            if count:
                rest, release = self._outgoing[0]
                self._outgoing[0] = rest[count:], release

    def _drop_all(self) -> None:
        while self._outgoing:
            _, release = self._outgoing.popleft()
            if release is not None:
                release()

    def close(self) -> None:
        """Close the connection, and discard messages that are not sent yet."""
        self._drop_all()
        self._socket.close()
