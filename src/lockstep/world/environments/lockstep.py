"""Processes started by `lockstep run` or `lockstep.launch`: torchrun's variables and a mark."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace

from lockstep.world.environments import init_method, torchrun
from lockstep.world.model import World

#: Set by the launcher in every worker, to the version that started it.
MARK = "LOCKSTEP_LAUNCHER"
#: Set by the launcher in a server, which is no worker: its number.
SERVER = "LOCKSTEP_SERVER"
#: Set by the launcher in a server: where the script's own modules are.
SERVER_ROOT = "LOCKSTEP_SERVER_ROOT"
#: Set by the launcher where there are servers: the secret that workers and servers share.
TOKEN = "LOCKSTEP_TOKEN"  # noqa: S105 - the name of a variable

#: What ends a server, sent by its launcher. It ignores what is sent to all processes of a job: as long as
#: workers may come, it serves. Nothing else uses this signal; it ends a server that is not ready for it.
END_SERVER = signal.SIGRTMIN + 6


def detect(environ: Mapping[str, str]) -> World | None:
    """Return the world that `lockstep run` meant for this process, or `None` without its mark."""
    if MARK not in environ:
        return None
    world = torchrun.read(environ, environment="lockstep", reason=f"{MARK} is set")
    return replace(world, launch_file=environ.get(init_method.STORE) or None)
