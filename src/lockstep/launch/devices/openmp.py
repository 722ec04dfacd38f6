"""Settings of OpenMP that keep it from binding the launcher and its forked workers to one core.

With `OMP_PROC_BIND`, OpenMP's library ties the thread that loads it to the first core. In the launcher,
that is the thread from which all workers come: each of them would inherit the one core.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

#: Variables that tie threads to processors: of the specification, of GNU's library, of Intel's.
_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def tying(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables in `environ` that tie threads to processors."""
    if environ.get("OMP_PROC_BIND", "").lower() == "false":
        return ()
    return tuple(name for name in _VARIABLES if name in environ)


@contextlib.contextmanager
def untied() -> Iterator[None]:
    """Let the body load OpenMP's library without its thread being tied."""
    hidden = {name: os.environ.pop(name) for name in tying(os.environ)}
    try:
        yield
    finally:
        os.environ.update(hidden)
