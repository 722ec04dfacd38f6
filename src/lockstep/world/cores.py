"""What this machine gives a process to compute with."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    return len(os.sched_getaffinity(0))
