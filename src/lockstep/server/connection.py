"""One worker's connection, as a server sees it: frames come in and go out in pieces, and nothing waits."""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.exchange.frames import (
    HEADER,
    LONGEST_HELLO,
    LONGEST_META,
    Header,
    Kind,
    frame,
    parse,
    view,
)
from lockstep.server.memory import Lease, Pool

_PIECES = 512
#: Bytes that one worker may send before another one's turn comes.
_TURN = 1 << 24
#: Bytes of this machine: no frame of a worker has as many.
_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class BrokenError(Exception):
    """A connection that ended, or that says what no worker says."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A frame that has come in whole.

    Attributes:
        header: its fixed part.
        meta: its JSON.
        payload: its bytes, from the pool.
    """

    header: Header
    meta: dict[str, Any]
    payload: torch.Tensor


@dataclass(slots=True)
class _Outgoing:
    view: memoryview
    lease: Lease | None


class Connection:
    """A worker's connection.

    Args:
        connection: the socket.
        pool: memory for what comes in.

    Attributes:
        rank: who is at the other end; -1 before it has said so.
        has_left: whether it has said farewell.
        received: bytes that came in.
        sent: bytes that went out.
    """

    def __init__(self, connection: socket.socket, pool: Pool) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._socket = connection
        self._pool = pool
        self._incoming = self._read_frames()
        self._place = memoryview(b"")
        self._out: deque[_Outgoing] = deque()
        self.rank = -1
        self.has_left = False
        self.received = self.sent = 0
        self._wanted = next(self._incoming)

    def fileno(self) -> int:
        """Return the socket's descriptor, for a selector."""
        return self._socket.fileno()

    @property
    def has_output(self) -> bool:
        """Whether something waits to be sent."""
        return bool(self._out)

    # --- in --------------------------------------------------------------------------------------

    def read(self, heard: Callable[[Connection, Frame], None]) -> None:
        """Take what has come, and pass on the frames that are whole.

        Raises:
            BrokenError: if the connection has ended, or says what no worker says.
        """
        budget = _TURN
        while budget > 0 and isinstance(self._wanted, memoryview):
            count = self._receive(self._wanted)
            if count is None:
                return
            budget -= count
            self.received += count
            self._wanted = self._wanted[count:]
            while isinstance(self._wanted, memoryview) and not self._wanted:
                self._step(heard)

    def _receive(self, place: memoryview) -> int | None:
        try:
            count = self._socket.recv_into(place)
        except BlockingIOError:
            return None
        except OSError as error:
            raise BrokenError(str(error)) from error
        if not count:
            raise BrokenError("it closed its connection")
        return count

    def _step(self, heard: Callable[[Connection, Frame], None]) -> None:
        """Go on to the next part of a frame; there may be nothing to read for it."""
        found = next(self._incoming)
        while isinstance(found, Frame):
            heard(self, found)
            found = next(self._incoming)
        self._wanted = found

    def _read_frames(self) -> Iterator[memoryview | Frame]:
        """Yield places to fill, and frames that are whole then."""
        while True:
            head = bytearray(HEADER.size)
            yield memoryview(head)
            header = Header.unpack(head)
            self._check(header)
            text = bytearray(header.meta)
            yield memoryview(text)
            payload = self._take(header.payload)
            yield view(payload)
            yield Frame(header, _read(text), payload)

    def _take(self, size: int) -> torch.Tensor:
        """Return memory for the tensors of a frame, of any size that a frame's header may name."""
        try:
            if size <= _MEMORY:
                return self._pool.take(size)
        except RuntimeError as error:
            raise BrokenError(f"no memory for the {size} bytes that it sends: {error}") from error
        raise BrokenError(f"it is about to send {size} bytes, more than this machine's memory")

    def _check(self, header: Header) -> None:
        known = self.rank >= 0
        longest = LONGEST_META if known else LONGEST_HELLO
        strange = header.kind not in Kind.__members__.values() or header.meta > longest
        if strange or (not known and (header.kind != Kind.HELLO or header.payload)):
            raise BrokenError("it does not speak like a worker")

    # --- out -------------------------------------------------------------------------------------

    def send(
        self,
        kind: Kind,
        tensors: Sequence[torch.Tensor] = (),
        *,
        lease: Lease | None = None,
        **fields: Any,
    ) -> None:
        """Send a frame, as much of it as goes at once; the rest when there is room.

        Args:
            kind: what it is.
            tensors: what it carries; nobody may change them before they are sent.
            lease: told when all has been sent.
            fields: see `frames.frame`.
        """
        views = frame(kind, tensors, **fields)
        self._out += [_Outgoing(one, None) for one in views[:-1]]
        self._out.append(_Outgoing(views[-1], lease))
        self.write()

    def write(self) -> None:
        """Send what waits, as much as goes."""
        while self._out:
            pieces = [self._out[i].view for i in range(min(len(self._out), _PIECES))]
            try:
                count = self._socket.sendmsg(pieces)
            except BlockingIOError:
                return
            except OSError:
                self._drop_all()  # the worker is gone: reading will say so
                return
            self.sent += count
            self._drop(count)

    def _drop(self, count: int) -> None:
        while self._out and count >= self._out[0].view.nbytes:
            done = self._out.popleft()
            count -= done.view.nbytes
            if done.lease is not None:
                done.lease.done()
        if count:
            self._out[0].view = self._out[0].view[count:]

    def _drop_all(self) -> None:
        """Give up what waits: nobody is there to take it."""
        while self._out:
            lease = self._out.popleft().lease
            if lease is not None:
                lease.done()

    def complain(self, message: str, hint: str | None = None, *, kind: str = "peer") -> None:
        """Tell the worker why it cannot go on: another one (`peer`), or what it asks for (`model`)."""
        self.send(Kind.ERROR, meta={"message": message, "hint": hint, "kind": kind})

    def close(self) -> None:
        """Close the connection."""
        self._drop_all()
        self._socket.close()


def _read(text: bytearray) -> dict[str, Any]:
    try:
        return parse(text)
    except (ValueError, RecursionError) as error:
        raise BrokenError(f"JSON that is none: {error}") from error
