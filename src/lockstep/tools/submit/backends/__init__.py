"""Job schedulers: each module of this package defines one as `BACKEND`; its name is the module's."""

from __future__ import annotations

import importlib
import pkgutil

from lockstep.tools.submit.backend import Backend


def names() -> tuple[str, ...]:
    """Return the names of all backends."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load(name: str) -> Backend:
    """Return the backend that the module `name` defines, such as `slurm`."""
    backend: Backend = importlib.import_module(f"{__name__}.{name}").BACKEND
    return backend
