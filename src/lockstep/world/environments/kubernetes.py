"""Read rank, world size and rendezvous in a pod of an Indexed Job of Kubernetes.

The job may belong to a JobSet. Kubernetes sets `JOB_COMPLETION_INDEX` and a host name `JOB-INDEX` (in a
JobSet, `JOBSET-NAME-JOB-INDEX`); with a headless service, all pods can resolve `JOB-0.SERVICE`. No variable
of Kubernetes has the number of pods: it is read from `PET_NNODES`, which `--nnodes` of `lockstep run` sets,
too. Without `PET_NNODES`, each pod is a run of its own, as in a sweep.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping

from lockstep.errors import WorldError
from lockstep.world.environments import cluster_nodes
from lockstep.world.environments.variables import integer, master
from lockstep.world.model import World

_INDEX = "JOB_COMPLETION_INDEX"
#: Variable with the number of pods, or `MIN:MAX`; the flag `--nnodes` sets it, too.
COUNT = "PET_NNODES"


def is_pod(environ: Mapping[str, str]) -> bool:
    """Return whether this process runs in a pod of Kubernetes.

    The host name of a pod has an address only while the pod runs.
    """
    return "KUBERNETES_SERVICE_HOST" in environ


def detect(environ: Mapping[str, str]) -> World | None:
    """Return the world (rank, size, rendezvous) of a pod of an Indexed Job.

    Returns `None` elsewhere, and if the number of pods is 1 or unknown.

    Raises:
        WorldError: if the pod's number exceeds the number of pods, or the host name of pod 0 is unknown.
    """
    if _INDEX not in environ or COUNT not in environ:
        return None
    index = integer(environ, _INDEX)
    count = cluster_nodes.most_nodes(environ, COUNT)
    if count == 1:
        return None
    address, port = master(environ)
    address = address or _first_pod(index)
    return cluster_nodes.world(
        "kubernetes",
        node=index,
        count=count,
        address=address,
        port=port,
        key=f"kubernetes-{address}",
        names=(_INDEX, COUNT),
    )


def _first_pod(index: int) -> str:
    """Return the host name of pod 0, from this pod's own name `JOB-INDEX.SERVICE.NAMESPACE…`.

    `index` is the number of this pod, with which its name must agree.
    """
    name, dot, service = socket.getfqdn().partition(".")
    job, _, number = name.rpartition("-")
    if not job or number != str(index) or not dot:
        raise WorldError(
            f"kubernetes: {_INDEX} is {index}, and this host is {socket.getfqdn()!r}; expected the name of "
            f"a pod, JOB-{index}.SERVICE…",
            hint="the pods need a headless service, with its name as their `subdomain`; or set MASTER_ADDR",
        )
    return f"{job}-0.{service}"
