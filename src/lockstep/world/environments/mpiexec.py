"""Common parts of Open MPI and MPICH, whose `mpiexec` sets variables for ranks, but not for rendezvous."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.world.environments import init_method
from lockstep.world.environments.variables import master
from lockstep.world.model import World
from lockstep.world.network import LOOPBACK


def world(
    environ: Mapping[str, str],
    *,
    rank: int,
    size: int,
    local_rank: int | None,
    local_size: int | None,
    key: str | None,
    environment: str,
    reason: str,
) -> World:
    """Return the world of a process that `mpiexec` has started.

    On one node the rendezvous is on its loopback interface, under a name that only this job has. On
    several nodes no variable has the address of rank 0 or the number of a node: unless `MASTER_ADDR` and
    `MASTER_PORT` are set, rank 0 broadcasts its address over MPI at the rendezvous. `key` is a name that is
    the same in all processes of this job, and that no other job has. `environment` and `reason` are fields
    of the returned `World`.

    Raises:
        WorldError: if the numbers contradict each other.
    """
    address, port = master(environ)
    one_node = size == local_size
    if one_node and size > 1:
        address = address or LOOPBACK
    if port is not None or init_method.FILE in environ or size == 1:
        key = None
    return World(
        rank=rank,
        size=size,
        local_rank=rank if local_rank is None else local_rank,
        local_size=size if local_size is None else local_size,
        placed=one_node or size == 1,
        address=address,
        port=port,
        key=key,
        by_mpi=size > 1 and (address is None or (port is None and key is None)),
        environment=environment,
        reason=reason,
    )
