"""Processes started by `mpiexec` of MPICH, Intel MPI or MVAPICH.

All of them start processes by Hydra, which sets `PMI_RANK` and `PMI_SIZE` (the Process Management
Interface), `MPI_LOCALRANKID` and `MPI_LOCALNRANKS`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import WorldError
from lockstep.world import host
from lockstep.world.environments import mpiexec
from lockstep.world.environments.variables import integer
from lockstep.world.model import World

#: Names of Hydra's program that starts the processes of a job on a node.
_PROXIES = ("hydra_pmi_proxy", "pmi_proxy", "mpiexec.gforker")


def detect(environ: Mapping[str, str]) -> World | None:
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
    return mpiexec.world(
        environ,
        rank=integer(environ, "PMI_RANK"),
        size=size,
        local_rank=integer(environ, "MPI_LOCALRANKID") if has_local else None,
        local_size=local_size,
        key=_job() if size == local_size else None,
        environment="mpich",
        reason="PMI_RANK is set",
    )


def _job() -> str | None:
    """Return a name of this job on its node, from the Hydra process that is the parent of all ranks.

    Returns `None` if the parent of this process is another program, such as a shell.
    """
    parent = os.getppid()
    try:
        name = Path(f"/proc/{parent}/comm").read_text().strip()
    except OSError:
        return None
    started = host.process_fields(parent)[19:20]  # a process id may be used again
    return f"mpich-{parent}-{started[0]}" if started and name in _PROXIES else None
