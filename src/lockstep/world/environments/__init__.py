"""Read rank and world size from the environment variables of launchers; one module for each launcher."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from lockstep.errors import UsageError
from lockstep.registry import EnvironmentEntry, Registry, resolve
from lockstep.world.environments import init_method, torchrun
from lockstep.world.model import World

_HERE = "lockstep.world.environments"
_OWN = [
    # Before all others, whose variables a worker of Ray has if they were set where Ray was started.
    EnvironmentEntry(name="ray", detect=f"{_HERE}.ray:detect", starts_launchers=False),
    EnvironmentEntry(name="lockstep", detect=torchrun.detect_lockstep, starts_launchers=False),
    # Before torchrun, whose variables a PyTorchJob sets with another meaning.
    EnvironmentEntry(
        name="kubeflow",
        detect=f"{_HERE}.kubeflow:detect",
        launchers=f"{_HERE}.kubeflow:launchers",
        replaces_launchers=True,
    ),
    EnvironmentEntry(name="torchrun", detect=torchrun.detect, starts_launchers=False),
    EnvironmentEntry(name="openmpi", detect=f"{_HERE}.mpiexec:detect_openmpi"),
    EnvironmentEntry(name="mpich", detect=f"{_HERE}.mpiexec:detect_mpich"),
    EnvironmentEntry(name="slurm", detect=f"{_HERE}.slurm:detect"),
    EnvironmentEntry(name="skypilot", detect=f"{_HERE}.skypilot:detect"),
    EnvironmentEntry(name="volcano", detect=f"{_HERE}.volcano:detect"),
    EnvironmentEntry(
        name="kubernetes", detect=f"{_HERE}.kubernetes:detect", replaces_launchers=True
    ),
    EnvironmentEntry(
        name="single",
        detect=lambda _: World(reason="no launcher's variables are set"),
        starts_launchers=False,
    ),
]
#: Variable that selects an environment by name.
VARIABLE = "LOCKSTEP_ENVIRONMENT"
#: Variables of a launcher that are ignored if the script gives another rank and world size.
_LAUNCHERS_OWN = (
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "TORCHELASTIC_USE_AGENT_STORE",
)
ENVIRONMENTS: Registry[Any] = Registry("environment", "lockstep.environments", _OWN)


def detect(environ: Mapping[str, str] | None = None) -> World:
    """Return rank, world size and rendezvous from the variables in `environ`, by default `os.environ`.

    `LOCKSTEP_ENVIRONMENT` selects a launcher's environment; by default the first one whose variables are
    set is used. `LOCKSTEP_INIT_METHOD` sets the rendezvous address.

    Raises:
        WorldError: if the variables of the environment contradict each other.
        UsageError: if `LOCKSTEP_ENVIRONMENT` is unknown or its variables are not set, or if
            `LOCKSTEP_INIT_METHOD` is invalid.
    """
    environ = init_method.apply(os.environ if environ is None else environ)
    world = next(filter(None, (read(entry, environ) for entry in candidates(environ))), None)
    if world is None:
        wanted = environ[VARIABLE]
        raise UsageError(
            f"LOCKSTEP_ENVIRONMENT is {wanted!r}, but the variables of {wanted} are not set",
            hint=f"start with {wanted}, or unset LOCKSTEP_ENVIRONMENT",
        )
    if world.environment == "single" and init_method.has_address(environ):
        raise UsageError(
            f"{init_method.VARIABLE} is {environ[init_method.VARIABLE]!r}, and there is no rank for this "
            "process; expected RANK and WORLD_SIZE too",
            hint="set both, or add ?rank=K&world_size=N",
        )
    file = environ.get(init_method.FILE)
    return world if file is None or world.size == 1 else replace(world, file=file)


def given(
    init_method_url: str | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    *,
    has_store: bool = False,
    environ: Mapping[str, str] | None = None,
) -> World:
    """Return rank, world size and rendezvous from arguments as for `init_process_group`.

    `LOCKSTEP_INIT_METHOD` takes precedence over `init_method_url`. Without `rank` and `world_size`, the
    environment gives both. With `has_store`, the script passes its own store for the rendezvous.

    Raises:
        UsageError: if only one of `rank` and `world_size` is given.
        WorldError: if `rank` and `world_size` contradict each other.
    """
    if (rank is None) != (world_size is None):
        raise UsageError(
            f"rank is {rank} and world_size {world_size}; expected both or neither",
            hint="the environment knows them under every launcher",
        )
    environ = init_method.apply(os.environ if environ is None else environ, init_method_url)
    if has_store:
        environ = {**environ, init_method.FILE: "(a store of the script's own)"}
    if rank is None:
        return detect(environ)
    numbers = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    if not numbers.items() <= environ.items():  # the launcher's other variables do not apply
        environ = {name: environ[name] for name in environ if name not in _LAUNCHERS_OWN} | numbers
    return torchrun.read(environ, environment="given", reason="the script gave rank and world_size")


def candidates(environ: Mapping[str, str]) -> Iterator[EnvironmentEntry]:
    """Yield the entry of each launcher environment, in the order in which they are tried.

    The innermost launcher comes first: for example, torchrun may run inside a job of another package's
    launcher, and that launcher inside a Slurm job. If `LOCKSTEP_ENVIRONMENT` names a launcher environment,
    only the entry of that one is yielded.

    Raises:
        UsageError: if `LOCKSTEP_ENVIRONMENT` is unknown.
    """
    wanted = environ.get(VARIABLE)
    if wanted is not None:
        ENVIRONMENTS.require(wanted, VARIABLE)
        yield ENVIRONMENTS.find(wanted)
        return
    yield from _OWN[:4]
    yield from _published()
    yield from _OWN[4:]


@functools.cache
def _published() -> tuple[EnvironmentEntry, ...]:
    """Return the launcher environments that other packages register as entry points."""
    return tuple(map(ENVIRONMENTS.find, ENVIRONMENTS.names()[len(_OWN) :]))


def read(
    entry: EnvironmentEntry, environ: Mapping[str, str], *, launchers: bool = False
) -> World | None:
    """Return rank, size and rendezvous from one launcher's variables; `None` if these are not set.

    With `launchers`, this process is a `lockstep run` on one of several nodes; the result has the number of
    this `lockstep run` as rank, and their count as size.

    Raises:
        WorldError: if the variables contradict each other.
    """
    function = (entry.launchers or entry.detect) if launchers else entry.detect
    world: World | None = resolve(function)(environ)
    return None if world is None else replace(world, environment=entry.name)
