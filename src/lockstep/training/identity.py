"""What a run is: everything that its result depends on, as far as a run can know it."""

from __future__ import annotations

import torch

from lockstep.record.run_file import Identity, script_and_arguments, versions
from lockstep.training.settings import Settings
from lockstep.version import __version__


def describe(settings: Settings, *, replicas: int, threads: int, device: str) -> Identity:
    """Return the identity of a run.

    Args:
        settings: what it is asked to do.
        replicas: number of replicas.
        threads: intra-op threads per process.
        device: kind of device.
    """
    script, arguments = script_and_arguments()
    return Identity(
        name=settings.name,
        script=script,
        arguments=arguments,
        seed=settings.seed,
        replicas=replicas,
        threads=threads,
        precision=settings.precision,
        method=_method(settings),
        device=device,
        versions=versions(torch.__version__, __version__),
    )


def _method(settings: Settings) -> str:
    """Return how the run trains, where that may change its result; an exact run keeps its bits anyway."""
    if settings.exact:
        return "exact"
    named = {
        "strategy": settings.strategy,
        "exchange": settings.exchange,
        "sync_every": settings.sync_every,
        "staleness": settings.staleness,
    }
    return ", ".join(f"{name}={value}" for name, value in named.items() if value is not None)
