"""Read rank and world size from the environment variables of launchers; one module for each launcher."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lockstep.registry import EnvironmentEntry, Registry, resolve
from lockstep.world.model import World

_OWN = [
    EnvironmentEntry(
        name="lockstep",
        detect="lockstep.world.environments.lockstep:detect",
        starts_launchers=False,
    ),
    EnvironmentEntry(
        name="torchrun",
        detect="lockstep.world.environments.torchrun:detect",
        starts_launchers=False,
    ),
    EnvironmentEntry(name="openmpi", detect="lockstep.world.environments.openmpi:detect"),
    EnvironmentEntry(name="mpich", detect="lockstep.world.environments.mpich:detect"),
    EnvironmentEntry(name="slurm", detect="lockstep.world.environments.slurm:detect"),
    EnvironmentEntry(
        name="single",
        detect=lambda _: World(reason="no launcher's variables are set"),
        starts_launchers=False,
    ),
]
#: Variable that selects an environment by name.
VARIABLE = "LOCKSTEP_ENVIRONMENT"
ENVIRONMENTS: Registry[Any] = Registry("environment", "lockstep.environments", _OWN)


def candidates(environ: Mapping[str, str]) -> Iterator[EnvironmentEntry]:
    """Yield the launchers whose variables to read, in order of precedence: the innermost launcher first.

    For example, torchrun may run inside a job of another package's launcher, and that inside a Slurm job.

    Raises:
        UsageError: if `LOCKSTEP_ENVIRONMENT` is unknown.
    """
    wanted = environ.get(VARIABLE)
    if wanted is not None:
        ENVIRONMENTS.require(wanted, VARIABLE)
        yield ENVIRONMENTS.find(wanted)
        return
    yield from _OWN[:2]
    yield from _published()
    yield from _OWN[2:]


@functools.cache
def _published() -> tuple[EnvironmentEntry, ...]:
    """Return the launcher environments that other packages register as entry points."""
    return tuple(map(ENVIRONMENTS.find, ENVIRONMENTS.names()[len(_OWN) :]))


def read(entry: EnvironmentEntry, environ: Mapping[str, str]) -> World | None:
    """Return rank, size and rendezvous from one launcher's variables; `None` if these are not set.

    Raises:
        WorldError: if the variables contradict each other.
    """
    world: World | None = resolve(entry.detect)(environ)
    return None if world is None else replace(world, environment=entry.name)
