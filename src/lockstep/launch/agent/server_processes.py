"""Number and environment variables of a launch's parameter servers, which are processes but not ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from lockstep.engine.layout.server_count import check
from lockstep.launch.spec import LaunchSpec
from lockstep.world.device_types import HIDDEN
from lockstep.world.environments.torchrun import SERVER, SERVER_ROOT

#: Module that a parameter server runs in place of the user's script.
MODULE = "lockstep.engine.parameter_server"


def count(spec: LaunchSpec, environ: Mapping[str, str]) -> int:
    """Return the number of parameter servers of a launch.

    Raises:
        UsageError: if there are too many, none with strategy `ps`, or some with another strategy.
    """
    servers: int = spec.settings.value("servers", environ) or 0
    check(spec.settings.value("strategy", environ), servers, spec.settings.origin("servers"))
    return servers


def variables(index: int, spec: LaunchSpec) -> dict[str, str]:
    """Return environment variables of parameter server `index`, in addition to those all workers share."""
    # Directory in which the server may import the script's modules; workers cannot change it.
    root = Path(sys.path[0] if spec.kind == "function" and sys.path else "")
    if spec.kind == "script":
        root = Path(spec.target).resolve().parent
    # Servers compute on the CPU.
    return {SERVER: str(index), SERVER_ROOT: str(root.resolve()), **HIDDEN}
