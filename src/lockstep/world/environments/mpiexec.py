"""Read rank, world size and rendezvous of a process that `mpiexec` has started.

Open MPI sets the variables of https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html;
`OMPI_COMM_WORLD_NODE_RANK` is the number of the process among all jobs on its node, not the number of the
node. MPICH, Intel MPI and MVAPICH start processes by Hydra, which sets `PMI_RANK` and `PMI_SIZE` (of the
Process Management Interface), `MPI_LOCALRANKID` and `MPI_LOCALNRANKS`. Neither Open MPI nor Hydra sets
variables for a rendezvous.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import WorldError
from lockstep.world import host
from lockstep.world.environments import init_method
from lockstep.world.environments.variables import integer, master
from lockstep.world.model import World
from lockstep.world.network import LOOPBACK

_PREFIX = "OMPI_COMM_WORLD_"
#: Variables with the name of the job: of Open MPI 5 and 4, of 4 and 3.
_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")
#: Variables with the address of Open MPI's server on this node, the same for all processes of a job.
_SERVER = ("PMIX_SERVER_URI2", "PMIX_SERVER_URI3", "OMPI_MCA_orte_local_daemon_uri")
#: Names of Hydra's program that starts the processes of a job on a node.
_PROXIES = ("hydra_pmi_proxy", "pmi_proxy", "mpiexec.gforker")


def detect_openmpi(environ: Mapping[str, str]) -> World | None:
    """Return the world (rank, size, rendezvous) from Open MPI's variables; `None` without them.

    Raises:
        WorldError: if a variable is missing or contradicts another.
    """
    if f"{_PREFIX}RANK" not in environ and f"{_PREFIX}SIZE" not in environ:
        return None
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, size, local_rank, local_size = (integer(environ, _PREFIX + name) for name in names)
    return _world(
        environ,
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        key=_job_of_openmpi(environ, one_node=size == local_size),
        environment="openmpi",
        reason=f"{_PREFIX}RANK is set",
    )


def _job_of_openmpi(environ: Mapping[str, str], *, one_node: bool) -> str | None:
    """Return a unique name of this job from Open MPI's variables; `None` if they have no name.

    Open MPI's own name consists of host name and process id, which two containers on one network may share.
    If all processes are on one node (`one_node`), the address of the job's server is appended, which makes
    the name unique.
    """
    job = _first(environ, _JOB)
    server = _first(environ, _SERVER) if one_node else ""
    return "-".join(filter(None, ("openmpi", job, server))) if job else None


def _first(environ: Mapping[str, str], names: tuple[str, ...]) -> str:
    return next((environ[name] for name in names if environ.get(name)), "")


def detect_mpich(environ: Mapping[str, str]) -> World | None:
    """Return the world (rank, size, rendezvous) from Hydra's variables; `None` without them.

    Also returns `None` if `srun` has set these variables, as it may for an MPI program; then Slurm's own
    variables are read.

    Raises:
        WorldError: if a variable is missing or contradicts another.
    """
    if "PMI_RANK" not in environ and "PMI_SIZE" not in environ:
        if "PMI_PORT" in environ and "PMI_ID" in environ:  # else each rank would train alone
            raise WorldError(
                "PMI_PORT and PMI_ID are set, which don't say how many processes there are; "
                "expected PMI_RANK and PMI_SIZE",
                hint="start mpiexec without -pmi-port",
            )
        return None
    by_srun = (("SLURM_PROCID", "PMI_RANK"), ("SLURM_STEP_NUM_TASKS", "PMI_SIZE"))
    if all(slurm in environ and environ[slurm] == environ.get(pmi) for slurm, pmi in by_srun):
        return None
    has_local = "MPI_LOCALRANKID" in environ or "MPI_LOCALNRANKS" in environ
    size = integer(environ, "PMI_SIZE")
    local_size = integer(environ, "MPI_LOCALNRANKS") if has_local else None
    return _world(
        environ,
        rank=integer(environ, "PMI_RANK"),
        size=size,
        local_rank=integer(environ, "MPI_LOCALRANKID") if has_local else None,
        local_size=local_size,
        key=_job_of_mpich() if size == local_size else None,
        environment="mpich",
        reason="PMI_RANK is set",
    )


def _job_of_mpich() -> str | None:
    """Return a name of this job, unique on its node, from its Hydra process, the parent of all ranks.

    Returns `None` if the parent of this process is another program, such as a shell.
    """
    parent = os.getppid()
    try:
        name = Path(f"/proc/{parent}/comm").read_text().strip()
    except OSError:
        return None
    started = host.process_fields(parent)[19:20]  # a process id may be used again
    return f"mpich-{parent}-{started[0]}" if started and name in _PROXIES else None


def _world(
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
    """Return the world (rank, size, rendezvous) of a process that `mpiexec` has started.

    The rendezvous of a job on one node is on the loopback interface. On several nodes, no variable has the
    address of rank 0 or the number of a node: unless `MASTER_ADDR` and `MASTER_PORT` are set, rank 0
    broadcasts its address over MPI at the rendezvous.

    `key` is a name that all processes of this job have, and no process of another job. `local_rank` and
    `local_size` are `None` if unknown. `environment` and `reason` are fields of the returned `World`.

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
