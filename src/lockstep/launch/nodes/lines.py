"""`LineReader` and `Waker`: helpers with which a coordinator's client and server read from sockets."""

from __future__ import annotations

import contextlib
import socket

from lockstep.launch.nodes.messages import LINE

#: Maximum number of bytes that are read from a socket at once.
READ = 1 << 16


class LineReader:
    """Splits the bytes that arrive from a socket into lines; keeps an incomplete line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes; keep an incomplete line for the next call.

        Raises:
            ValueError: if a line is longer than the longest message.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        if max(map(len, (*lines, self._rest))) > LINE:
            raise ValueError(f"a line of more than {LINE} bytes")
        return lines


class Waker:
    """Lets one thread end another thread's wait for messages on sockets.

    The waiting thread includes the socket `reader` in its wait.
    """

    def __init__(self) -> None:
        self.reader, self._writer = socket.socketpair()
        self.reader.setblocking(False)
        self._writer.setblocking(False)

    def wake(self) -> None:
        """End the current wait of the thread that waits for messages.

        If the thread does not wait, its next wait ends at once. Any other thread may call this method.
        """
        with contextlib.suppress(OSError):  # closed, or full of calls that were not read yet
            self._writer.send(b"\0")

    def clear(self) -> None:
        """Forget all earlier calls of `wake`, so that the next wait does not end at once."""
        with contextlib.suppress(OSError):
            self.reader.recv(READ)

    def close(self) -> None:
        """Close both sockets."""
        self.reader.close()
        self._writer.close()
