"""Job schedulers for `lockstep submit`: each module here defines a `Backend` named `BACKEND`."""

from __future__ import annotations

import importlib
import pkgutil

from lockstep.tools.submit.backend import Backend


def names() -> tuple[str, ...]:
    """Return the names of all backends, such as `slurm`."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def load(name: str) -> Backend:
    """Import the module `name`, such as `slurm`, and return the backend that it defines."""
    backend: Backend = importlib.import_module(f"{__name__}.{name}").BACKEND
    return backend
