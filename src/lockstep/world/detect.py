"""`detect`: read rank, world size and rendezvous from the environment variables of a launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from lockstep.errors import UsageError
from lockstep.world.environments import VARIABLE, candidates, init_method, read, torchrun
from lockstep.world.model import World


def detect(environ: Mapping[str, str] | None = None) -> World:
    """Return the world that `environ` describes.

    `LOCKSTEP_ENVIRONMENT` names an environment and overrules the precedence; `LOCKSTEP_INIT_METHOD`
    has the rendezvous address.

    Args:
        environ: variables to read; the process's own by default.

    Raises:
        WorldError: if the variables of the environment contradict each other.
        UsageError: if `LOCKSTEP_ENVIRONMENT` names none, or one whose variables are absent, or if
            `LOCKSTEP_INIT_METHOD` is no init method.
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
    """Return the world that a script describes by the arguments of `init_process_group`.

    `LOCKSTEP_INIT_METHOD` wins over `init_method_url`. Rank and world size are given together, or come from
    the environment. With `has_store`, the script has a store of its own for the rendezvous.

    Raises:
        UsageError: if only one of `rank` and `world_size` is given.
        WorldError: if they contradict each other.
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
    if not numbers.items() <= environ.items():  # the launcher counts other processes
        environ = {name: environ[name] for name in environ if name not in _LAUNCHERS_OWN} | numbers
    return torchrun.read(environ, environment="given", reason="the script gave rank and world_size")


#: Variables of a launcher that mean nothing where the script gives other ranks.
_LAUNCHERS_OWN = (
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "TORCHELASTIC_USE_AGENT_STORE",
)
