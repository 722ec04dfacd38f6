"""What results depend on besides the layout: the script, and the machine that ran it."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from lockstep.version import __version__
from lockstep.world.cores import usable_cores


def describe_script(path: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Return the identity of a script and its arguments."""
    return {
        "name": Path(path).name,
        "arguments": list(arguments),
        "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest(),
    }


def describe_machine() -> dict[str, Any]:
    """Return the identity of this machine, and the versions that are installed."""
    return {
        "processor": _processor(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "versions": {
            "python": platform.python_version(),
            "torch": metadata.version("torch"),
            "lockstep": __version__,
        },
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
