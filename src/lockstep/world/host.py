"""Identity and name of this host, processes on it, and versions of installed libraries."""

from __future__ import annotations

import os
import platform
import socket
import struct
from pathlib import Path

from lockstep.version import __version__

_CREDENTIALS = struct.Struct("iII")  # process, user, group: unix(7), SO_PEERCRED


def identity() -> str:
    """Return an id that is equal for two processes exactly if both are on the same host.

    The id names a boot of the kernel and a network namespace, so that two containers on one machine count
    as two hosts.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"  # noqa: PTH116 - not a file but a link's target


def processor() -> str:
    """Return the model name of this machine's CPU."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def process_fields(pid: int) -> list[str]:
    """Return the fields of `/proc/PID/stat` from the process state on; empty if no process is `pid`."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return []
    return text.rpartition(b")")[2].decode().split()


def peer(end: socket.socket) -> tuple[int, int]:
    """Return process id and user id of the process at the other end of a Unix socket.

    Raises:
        OSError: if the socket is not connected.
    """
    credentials = end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, user, _ = _CREDENTIALS.unpack(credentials)
    return pid, user


def name() -> str:
    """Return the name of this host, without a DNS lookup."""
    return socket.gethostname()


def versions() -> dict[str, str]:
    """Return the versions of the packages that may change the bits of a result, by package."""
    import numpy as np
    import torch

    return {
        "lockstep": __version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "torch": torch.__version__,
        "numpy": np.__version__,
    }
