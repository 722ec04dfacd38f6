"""Settings of OpenMP that keep it from binding the launcher and its forked workers to one core.

With `OMP_PROC_BIND`, OpenMP's library binds the thread that loads it to the first core. In the launcher,
that is the thread from which all workers come: each of them would inherit the one core.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

#: Variables that bind threads to processors: of the specification, of GNU's library, of Intel's.
_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def binding_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables in `environ` that bind threads to processors."""
    if environ.get("OMP_PROC_BIND", "").lower() == "false":
        return ()
    return tuple(name for name in _VARIABLES if name in environ)


@contextlib.contextmanager
def loaded_unbound(threads: str | None = None) -> Iterator[None]:
    """Let the body load OpenMP's library without binding its thread; `threads` is its `OMP_NUM_THREADS`."""
    names = (*binding_variables(os.environ), *(() if threads is None else ("OMP_NUM_THREADS",)))
    before = {name: os.environ.pop(name) for name in names if name in os.environ}
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = threads
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)
