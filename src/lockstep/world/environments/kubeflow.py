"""Read rank, world size and rendezvous from the variables that Kubeflow sets in its pods.

The pods are those of a TrainJob (Trainer 2) or of a PyTorchJob (Training Operator 1). Both jobs set
torchrun's variables `PET_*` for a launcher in each pod, such as `PET_NODE_RANK`, the pod's number. A
PyTorchJob also sets `RANK` to the pod's number, and `WORLD_SIZE` to the number of processes (before
operator 1.7: of pods). This `RANK` is the rank of a process only if each pod has one process.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.errors import WorldError
from lockstep.world.environments import cluster_nodes
from lockstep.world.environments.variables import integer, master
from lockstep.world.model import World

_NODE, _COUNT, _PROCESSES = "PET_NODE_RANK", "PET_NNODES", "PET_NPROC_PER_NODE"
_MASTER = ("MASTER_ADDR", "MASTER_PORT")


def detect(environ: Mapping[str, str]) -> World | None:
    """Return the world (rank, size, rendezvous) of a Kubeflow pod with one process; `None` elsewhere.

    Raises:
        WorldError: if variables are missing, or a pod is to have several processes.
    """
    found = launchers(environ)
    processes = environ.get(_PROCESSES, "1")
    if found is not None and processes != "1":
        raise WorldError(
            f"kubeflow: {_PROCESSES} is {processes}, and no launcher has started this process; expected 1, "
            "or a launcher",
            hint="start the script with `lockstep run`, which reads the variables PET_*",
        )
    return found


def launchers(environ: Mapping[str, str]) -> World | None:
    """Return number, count and rendezvous of the launchers in Kubeflow's pods, as a `World`.

    Its rank is the number of this pod's launcher, and its size is the number of pods. Returns `None`
    outside of Kubeflow, in a worker of a launcher, and if there is only one pod.

    Raises:
        WorldError: if a variable is missing or contradicts another.
    """
    # A worker of torchrun has LOCAL_RANK, too, and a process that the script has started another RANK.
    number = environ.get(_NODE)
    is_worker = "LOCAL_RANK" in environ or environ.get("RANK", number) != number
    if number is None or is_worker or "PET_RDZV_ENDPOINT" in environ:
        return None
    count = cluster_nodes.most_nodes(environ, _COUNT)
    if count == 1:
        return None
    named = {name: environ.get(f"PET_{name}", environ.get(name, "")) for name in _MASTER}
    address, port = master({name: value for name, value in named.items() if value})
    if address is None or port is None:
        raise WorldError(
            f"kubeflow: {_NODE} and {_COUNT} are set, but PET_MASTER_ADDR and PET_MASTER_PORT are not; "
            "expected the host of pod 0",
            hint="a TrainJob needs `torch` in the mlPolicy of its runtime, a PyTorchJob a Master replica",
        )
    node = integer(environ, _NODE)
    return cluster_nodes.world(
        "kubeflow", node=node, count=count, address=address, port=port, names=(_NODE, _COUNT)
    )
