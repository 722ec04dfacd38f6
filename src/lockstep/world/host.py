"""Which host this is: two processes are on one host if they can share memory and local sockets."""

from __future__ import annotations

import os
import platform
import socket
from pathlib import Path

from lockstep.version import __version__


def identity() -> str:
    """Return a name that processes share if, and only if, they are on one host.

    A boot of the kernel and a network namespace: two containers on one machine are two hosts.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"  # noqa: PTH116 - not a file but a link's target


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
