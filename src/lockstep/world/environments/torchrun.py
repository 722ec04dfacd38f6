"""Processes started by torchrun, or by anything that sets the variables of `env://`.

The variables are those of https://docs.pytorch.org/docs/stable/elastic/run.html; `RANK` and
`WORLD_SIZE` alone (as scripts on `torch.multiprocessing.spawn` set them) mean a single node.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import WorldError
from lockstep.world.environments.variables import integer
from lockstep.world.model import World


def detect(environ: Mapping[str, str]) -> World | None:
    """Return the world that torchrun's variables describe, or `None` without `RANK` and `WORLD_SIZE`."""
    if "RANK" not in environ or "WORLD_SIZE" not in environ:
        return None
    return read(environ, environment="torchrun", reason="RANK and WORLD_SIZE are set")


def read(environ: Mapping[str, str], *, environment: str, reason: str) -> World:
    """Read the variables that torchrun and `lockstep run` share.

    Raises:
        WorldError: if one is missing or contradicts another.
    """
    rank, size = integer(environ, "RANK"), integer(environ, "WORLD_SIZE")
    local_size = integer(environ, "LOCAL_WORLD_SIZE", default=size)
    if local_size < 1:
        raise WorldError(f"LOCAL_WORLD_SIZE is {local_size}; expected at least 1")
    return World(
        rank=rank,
        size=size,
        local_rank=integer(environ, "LOCAL_RANK", default=rank),
        local_size=local_size,
        node_rank=integer(environ, "GROUP_RANK", default=0),
        node_count=integer(environ, "GROUP_WORLD_SIZE", default=max(1, size // local_size)),
        address=environ.get("MASTER_ADDR"),
        port=integer(environ, "MASTER_PORT", default=0) or None,
        generation=integer(environ, "TORCHELASTIC_RESTART_COUNT", default=0),
        agent_store=environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        environment=environment,
        reason=reason,
    )
