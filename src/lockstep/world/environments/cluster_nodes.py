"""Common code for clusters that start one process on each of several numbered machines or pods."""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import WorldError
from lockstep.world.environments.variables import integer
from lockstep.world.model import World


def most_nodes(environ: Mapping[str, str], name: str) -> int:
    """Return the number of nodes in the variable `name` of `environ`; of `MIN:MAX`, the maximum.

    Raises:
        WorldError: if the variable is absent, or has no number.
    """
    text = environ.get(name)
    return integer({} if text is None else {name: text.rpartition(":")[2]}, name)


def world(
    environment: str,
    *,
    node: int,
    count: int,
    address: str,
    port: int | None = None,
    key: str | None = None,
    names: tuple[str, str],
) -> World:
    """Return the world (rank, size, rendezvous) of the only process on machine `node` of `count`.

    The process may also be a `lockstep run`, which starts the ranks of its machine. `environment`,
    `address`, `port` and `key` are fields of the returned `World`. `names` are the names of the variables
    with `node` and `count`, for messages.

    Raises:
        WorldError: if `node` is not below `count`.
    """
    if not 0 <= node < count:
        raise WorldError(
            f"{environment}: {names[0]} is {node}, and {names[1]} says {count} machine(s); expected 0 to "
            f"{count - 1}",
            hint="start as many machines or pods as the run has nodes (--nnodes)",
        )
    return World(
        rank=node,
        size=count,
        node_rank=node,
        node_count=count,
        address=address,
        port=port,
        key=key,
        environment=environment,
        reason=f"{names[0]} is set",
    )
