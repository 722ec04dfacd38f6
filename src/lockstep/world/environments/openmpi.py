"""Processes started by Open MPI's `mpiexec` (also `mpirun`, `prterun`).

The variables are those of https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html.
`OMPI_COMM_WORLD_NODE_RANK` does not number nodes, but the processes on a node, over all jobs.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockstep.world.environments import mpiexec
from lockstep.world.environments.variables import integer
from lockstep.world.model import World

_PREFIX = "OMPI_COMM_WORLD_"
#: Variables with the name of the job: of Open MPI 5 and 4, of 4 and 3.
_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
#: Variables with the address of Open MPI's server on this node, the same for all processes of a job.
_SERVER = ("PMIX_SERVER_URI2", "PMIX_SERVER_URI3", "OMPI_MCA_orte_local_daemon_uri")


def detect(environ: Mapping[str, str]) -> World | None:
    """Return the world (rank, size, rendezvous) from Open MPI's variables; `None` without them.

    Raises:
        WorldError: if a variable is missing or contradicts another.
    """
    if f"{_PREFIX}RANK" not in environ and f"{_PREFIX}SIZE" not in environ:
        return None
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, size, local_rank, local_size = (integer(environ, _PREFIX + name) for name in names)
    return mpiexec.world(
        environ,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        key=_key(environ, one_node=size == local_size),
        environment="openmpi",
        reason=f"{_PREFIX}RANK is set",
    )


def _key(environ: Mapping[str, str], *, one_node: bool) -> str | None:
    """Return a unique name of this job; `None` if Open MPI gives none.

    Open MPI's own name has the host name and a process id, which containers on one network may share; the
    address of the job's server makes it unique.
    """
    job = _first(environ, _JOB)
    server = _first(environ, _SERVER) if one_node else ""
    return "-".join(filter(None, ("openmpi", job, server))) if job else None


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")
