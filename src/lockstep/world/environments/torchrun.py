"""Processes started by torchrun, or by anything that sets the variables of `env://`.

The variables are those of https://docs.pytorch.org/docs/stable/elastic/run.html; `RANK` and
`WORLD_SIZE` alone (as scripts with `torch.multiprocessing.spawn` set them) do not say which ranks
share a node: the ranks compare their hosts at the rendezvous.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import WorldError
from lockstep.world.environments import init_method
from lockstep.world.environments.variables import integer, master
from lockstep.world.model import World


def detect(environ: Mapping[str, str]) -> World | None:
    """Return the world (rank, size, rendezvous) from torchrun's variables; `None` without them."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    return read(environ, environment="torchrun", reason="RANK and WORLD_SIZE are set")


def read(environ: Mapping[str, str], *, environment: str, reason: str) -> World:
    """Return rank, size and rendezvous from the variables that torchrun and `lockstep run` both set.

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
    """Return whether the launcher that set `WORLD_SIZE` has set local ranks, too.

    A script that a launcher started as its only process may start processes of its own, and give
    them `RANK` and `WORLD_SIZE`; they inherit the launcher's local ranks, which do not apply to them.
    """
    if "LOCAL_RANK" not in environ or "LOCAL_WORLD_SIZE" not in environ:
        return False
    alone = integer(environ, "LOCAL_WORLD_SIZE") == 1
    if "GROUP_RANK" not in environ:
        return integer(environ, "LOCAL_WORLD_SIZE") == size
    return not (alone and size > 1 and integer(environ, "GROUP_WORLD_SIZE", default=1) == 1)
