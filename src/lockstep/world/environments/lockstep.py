"""Processes started by `lockstep run` or `lockstep.launch`: variables of torchrun and of Lockstep."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace

from lockstep.world.environments import init_method, torchrun
from lockstep.world.model import World

#: Variable that the launcher sets in every worker, to the version of Lockstep.
MARK = "LOCKSTEP_LAUNCHER"
#: Variable that the launcher sets in a parameter server, to its number.
SERVER = "LOCKSTEP_SERVER"
#: Variable that the launcher sets in a parameter server, to the directory of the script's modules.
SERVER_ROOT = "LOCKSTEP_SERVER_ROOT"
#: Variable that the launcher sets if there are parameter servers, to a secret for connections.
TOKEN = "LOCKSTEP_TOKEN"  # noqa: S105 - the name of a variable

#: Signal by which the launcher ends a parameter server, which ignores the signals that a scheduler sends to
#: all processes of a job.
END_SERVER = signal.SIGRTMIN + 6


def detect(environ: Mapping[str, str]) -> World | None:
    """Return the world (rank, size, rendezvous) in workers of `lockstep run`; `None` elsewhere."""
    if MARK not in environ:
        return None
    world = torchrun.read(environ, environment="lockstep", reason=f"{MARK} is set")
    return replace(world, launch_file=environ.get(init_method.STORE) or None)
