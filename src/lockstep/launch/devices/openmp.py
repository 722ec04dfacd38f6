"""Load OpenMP without binding the launcher to one core, even if the user has set `OMP_PROC_BIND`.

With `OMP_PROC_BIND`, OpenMP binds the thread that loads its library to the first core. In the launcher, all
forked workers would inherit this binding.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping

#: Environment variables that bind OpenMP threads to CPUs: standard, GNU and Intel.
_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")


def binding_variables(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of variables in `environ` that bind OpenMP threads to CPUs."""
    if environ.get("OMP_PROC_BIND", "").lower() == "false":
        return ()
    return tuple(name for name in _VARIABLES if name in environ)


@contextlib.contextmanager
def loaded_unbound(threads: str | None = None) -> Iterator[None]:
    """Context manager: unset variables with which OpenMP would bind this process to one core.

    Use it around imports that load OpenMP. If `threads` is given, `OMP_NUM_THREADS` has this value in the
    meantime. All variables are restored at the end.
    """
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
