"""Identity of a host: its processes share memory and local sockets."""

from __future__ import annotations

import os
import platform
import socket
import struct
from pathlib import Path

from lockstep.version import __version__

_CREDENTIALS = struct.Struct("iII")  # process, user, group: unix(7), SO_PEERCRED


def identity() -> str:
    """Return a name that processes share if, and only if, they are on one host.

    A boot of the kernel and a network namespace: two containers on one machine are two hosts.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"  # noqa: PTH116 - not a file but a link's target


def process_fields(pid: int) -> list[str]:
    """Return the fields of a process from the third of proc(5) on, its state; none where it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    return text.rpartition(b")")[2].decode().split()


def peer(end: socket.socket) -> tuple[int, int]:
    """Return process and user at the other end of a socket of this host.

    Raises:
        OSError: if there is none.
    """
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return pid, user


def name() -> str:
    """Return the host's name, without asking a resolver."""
    return socket.gethostname()


def versions() -> dict[str, str]:
    """Return the versions that the bits of a result depend on."""
    import numpy as np
    import torch

    return {
        "lockstep": __version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
