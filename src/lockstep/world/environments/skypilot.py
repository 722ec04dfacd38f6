"""Read rank, world size and rendezvous on the nodes of a SkyPilot task.

SkyPilot starts the `run` commands of a task once on each node. The variables are those of
https://docs.skypilot.co/en/latest/running-jobs/environment-variables.html: `SKYPILOT_NODE_RANK`,
`SKYPILOT_NODE_IPS` (one address per line), `SKYPILOT_NUM_NODES`, `SKYPILOT_TASK_ID`.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import WorldError
from lockstep.world.environments import cluster_nodes
from lockstep.world.environments.variables import integer, master
from lockstep.world.model import World

_RANK, _ADDRESSES, _COUNT = "SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS", "SKYPILOT_NUM_NODES"


def detect(environ: Mapping[str, str]) -> World | None:
    """Return the world (rank, size, rendezvous) of a SkyPilot node; `None` elsewhere or for one node.

    Raises:
        WorldError: if a variable is missing or contradicts another.
    """
    if _RANK not in environ and _ADDRESSES not in environ:
        return None
    addresses = environ.get(_ADDRESSES, "").split()
    if not addresses:
        raise WorldError(
            f"skypilot: {_ADDRESSES} has no address, though {_RANK} is set; expected one for each node",
            hint="SkyPilot sets both for the `run` commands of a task: pass both on",
        )
    rank, count = integer(environ, _RANK), integer(environ, _COUNT, default=len(addresses))
    if count != len(addresses):
        raise WorldError(
            f"skypilot: {_ADDRESSES} has {len(addresses)} address(es), but {_COUNT} is {count}; expected "
            "the same"
        )
    if count == 1:
        return None
    address, port = master(environ)
    return cluster_nodes.world(
        "skypilot",
        node=rank,
        count=count,
        address=address or addresses[0],
        port=port,
        key=f"skypilot-{environ.get('SKYPILOT_TASK_ID') or '-'.join(addresses)}",
        names=(_RANK, _ADDRESSES),
    )
