"""A contestant's side of taking turns: sleep in a read until the parent says which case is next."""

from __future__ import annotations

import os
import socket
import struct

#: Name of the variable with the address of the parent's socket.
ADDRESS = "BENCHMARK_ADDRESS"
#: What a turn took, as it goes to the parent.
SECONDS = struct.Struct("<d")


class RankOrder:
    """This rank's connection to the parent."""

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(os.environ[ADDRESS])

    def wait(self) -> int | None:
        """Return the number of the case whose turn it is; `None` when there are no more turns."""
        word = self._socket.recv(1)
        return word[0] if word else None

    def done(self, seconds: float) -> None:
        """Tell the parent how long the turn took."""
        self._socket.sendall(SECONDS.pack(seconds))
