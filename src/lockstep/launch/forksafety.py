"""Whether this process may be forked into workers, and what can be done so that it may.

A forked child has one thread and a copy of every lock and pool. Harmless are threads that were there
right after importing torch (OpenBLAS, which handles forks). Not harmless:

- CUDA: a context does not survive a fork.
- a process group: its threads and connections belong to the parent.
- libgomp's pool: a child believes in threads that it does not have and waits for them for ever.
  libgomp can be told to end the pool (`omp_pause_resource_all`); it makes a new one when needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from pathlib import Path

#: `omp_pause_hard` of the OpenMP 5.0 specification, section 3.2.44: give all resources back.
_PAUSE_HARD = 2


def reason_against_fork() -> str | None:
    """Return why this process cannot be forked into workers, or `None` if it can.

    Ends libgomp's pool of the calling thread where there is one.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if torch.cuda.is_initialized():
        return "CUDA is initialised in this process"
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return "a process group of torch.distributed exists in this process"
    return _end_thread_pools()


def _end_thread_pools() -> str | None:
    for library in _libgomps():
        try:
            status = ctypes.CDLL(library).omp_pause_resource_all(_PAUSE_HARD)
        except (OSError, AttributeError):
            return f"{Path(library).name} may have threads that it cannot be told to end"
        if status != 0:
            return f"{Path(library).name} would not end its threads"
    return None


def _libgomps() -> set[str]:
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/maps").read_text().splitlines()
        paths = {line.split(maxsplit=5)[-1] for line in lines if "libgomp" in line}
        return {path for path in paths if path.startswith("/")}
    return set()
