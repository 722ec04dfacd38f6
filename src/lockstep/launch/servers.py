"""Parameter servers of a launch: processes beside the workers that are no ranks. Pure, starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import UsageError
from lockstep.launch.spec import LaunchSpec
from lockstep.layout.servers import check
from lockstep.world.environments.lockstep import SERVER, SERVER_ROOT, SERVERS

#: What a server runs: never the user's script.
MODULE = "lockstep.server"


def count(spec: LaunchSpec, environ: Mapping[str, str]) -> int:
    """Return how many servers a launch has.

    Raises:
        UsageError: if the strategy that is asked for needs some, or has no use for them.
    """
    servers, name = spec.method.servers, "--servers"
    if servers is None:
        text, name = environ.get(SERVERS, "0"), SERVERS
        if not text.isdecimal():
            raise UsageError(f"{SERVERS} is {text!r}; expected an integer of at least 0")
        servers = int(text)
    check(spec.method.strategy or environ.get("LOCKSTEP_STRATEGY"), servers, name)
    return servers


def variables(index: int, spec: LaunchSpec) -> dict[str, str]:
    """Return what a server's environment has that the workers' has not."""
    # It computes on the CPU, whatever the workers do.
    return {SERVER: str(index), SERVER_ROOT: _root(spec), "CUDA_VISIBLE_DEVICES": ""}


def _root(spec: LaunchSpec) -> str:
    """Return where a worker finds modules of the script's: nothing that a worker says adds to it."""
    if spec.kind == "script":
        return str(Path(spec.target).resolve().parent)
    return str(Path(sys.path[0] if spec.kind == "function" and sys.path else "").resolve())
