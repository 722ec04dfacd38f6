"""Read rank, world size and rendezvous from the variables of torchrun or `lockstep run`.

Other programs may set these variables as well, as for the init method `env://`. The variables are those of
https://docs.pytorch.org/docs/stable/elastic/run.html. `RANK` and `WORLD_SIZE` alone (as scripts with
`torch.multiprocessing.spawn` set them) do not say which ranks share a node: the ranks compare their hosts
at the rendezvous.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace

from lockstep.errors import WorldError
from lockstep.world.environments import init_method
from lockstep.world.environments.variables import integer, master
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
    """Return the world (rank, size, rendezvous) from torchrun's variables; `None` without them."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    return read(environ, environment="torchrun", reason="RANK and WORLD_SIZE are set")


def detect_lockstep(environ: Mapping[str, str]) -> World | None:
    """Return the world (rank, size, rendezvous) in workers of `lockstep run`; `None` elsewhere."""
    if MARK not in environ:
        return None
    world = read(environ, environment="lockstep", reason=f"{MARK} is set")
    return replace(world, launch_file=environ.get(init_method.STORE) or None)


def read(environ: Mapping[str, str], *, environment: str, reason: str) -> World:
    """Return rank, size and rendezvous from the variables that torchrun and `lockstep run` both set.

    `environment` and `reason` are fields of the returned `World`.

    Raises:
        WorldError: if a variable is missing or contradicts another.
    """
    rank, size = integer(environ, "RANK"), integer(environ, "WORLD_SIZE")
    address, port = master(environ)
    placed = _has_local_ranks(environ, size)
    local_rank, local_size, node_rank, node_count = rank, size, 0, 1
    if placed:
        local_rank = integer(environ, "LOCAL_RANK")
        local_size = integer(environ, "LOCAL_WORLD_SIZE")
        if local_size < 1:
            raise WorldError(f"LOCAL_WORLD_SIZE is {local_size}; expected at least 1")
        node_rank = integer(environ, "GROUP_RANK", default=0)
        node_count = integer(environ, "GROUP_WORLD_SIZE", default=max(1, size // local_size))
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        node_rank=node_rank,
        node_count=node_count,
        placed=placed,
        address=address,
        port=port,
        file=environ.get(init_method.FILE),
        generation=integer(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        environment=environment,
        reason=reason,
    )


def _has_local_ranks(environ: Mapping[str, str], size: int) -> bool:
    """Return whether `LOCAL_RANK` and `LOCAL_WORLD_SIZE` are set, and apply to this process.

    `size` is the value of `WORLD_SIZE`. A script that a launcher started as its only process may start
    processes of its own, and set their `RANK` and `WORLD_SIZE`. These processes inherit the launcher's
    `LOCAL_RANK` and `LOCAL_WORLD_SIZE`, which do not apply to them.
    """
    if "LOCAL_RANK" not in environ or "LOCAL_WORLD_SIZE" not in environ:
        return False
    alone = integer(environ, "LOCAL_WORLD_SIZE") == 1
    if "GROUP_RANK" not in environ:
        return integer(environ, "LOCAL_WORLD_SIZE") == size
    return not (alone and size > 1 and integer(environ, "GROUP_WORLD_SIZE", default=1) == 1)
