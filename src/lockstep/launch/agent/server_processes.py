"""Parameter servers of a launch: processes beside the workers that are no ranks. Pure, starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from lockstep.engine.layout.server_count import check
from lockstep.launch.spec import LaunchSpec
from lockstep.world.device_types import HIDDEN
from lockstep.world.environments.lockstep import SERVER, SERVER_ROOT

#: What a server runs: never the user's script.
MODULE = "lockstep.engine.parameter_server"


def count(spec: LaunchSpec, environ: Mapping[str, str]) -> int:
    """Return how many servers a launch has.

    Raises:
        UsageError: if the strategy that is asked for needs some, or has no use for them.
    """
    servers: int = spec.settings.value("servers", environ) or 0
    check(spec.settings.value("strategy", environ), servers, spec.settings.origin("servers"))
    return servers


def variables(index: int, spec: LaunchSpec) -> dict[str, str]:
    """Return the variables that a server has, and workers have not."""
    # Where a worker finds modules of the script's; no message from a worker adds to it.
    root = Path(sys.path[0] if spec.kind == "function" and sys.path else "")
    if spec.kind == "script":
        root = Path(spec.target).resolve().parent
    # It computes on the CPU, whatever the workers do.
    return {SERVER: str(index), SERVER_ROOT: str(root.resolve()), **HIDDEN}
