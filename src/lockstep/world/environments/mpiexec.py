"""Common parts of Open MPI and MPICH: `mpiexec` gives ranks, but no rendezvous address."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from lockstep.world.environments import init_method
from lockstep.world.environments.variables import meeting_place
from lockstep.world.model import World
from lockstep.world.network import LOOPBACK

#: From whether all ranks share a node to the name that only this job has there, if there is one.
FindKey = Callable[[bool], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Numbers:
    """Who a process is; `None` where its launcher doesn't say which ranks share a node."""

    rank: int
    size: int
    local_rank: int | None
    local_size: int | None


def world(
    environ: Mapping[str, str],
    numbers: Numbers,
    find_key: FindKey,
    *,
    environment: str,
    reason: str,
) -> World:
    """Return the world of a process that `mpiexec` has started.

    On one node the rendezvous is on its loopback interface, under a name that only this job has. On
    several nodes nothing says where rank 0 is, nor which number a node has: unless `MASTER_ADDR` and
    `MASTER_PORT` do, the ranks ask MPI at the rendezvous.

    Raises:
        WorldError: if the numbers contradict each other.
    """
    address, port = meeting_place(environ)
    one_node = numbers.size == numbers.local_size
    if one_node and numbers.size > 1:
        address = address or LOOPBACK
    is_known = port is not None or init_method.FILE in environ or numbers.size == 1
    key = None if is_known else find_key(one_node)
    has_place = address is not None and (port is not None or key is not None)
    return World(
        rank=numbers.rank,
        size=numbers.size,
        local_rank=numbers.rank if numbers.local_rank is None else numbers.local_rank,
        local_size=numbers.size if numbers.local_size is None else numbers.local_size,
        placed=one_node or numbers.size == 1,
        address=address,
        port=port,
        key=key,
        by_mpi=numbers.size > 1 and not has_place,
        environment=environment,
        reason=reason,
    )
