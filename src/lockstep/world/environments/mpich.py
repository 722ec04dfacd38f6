"""Processes started by `mpiexec` of MPICH, Intel MPI or MVAPICH.

All of them start processes by Hydra, which sets `PMI_RANK` and `PMI_SIZE` (the Process Management
Interface), `MPI_LOCALRANKID` and `MPI_LOCALNRANKS`.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import WorldError
from lockstep.world import host
from lockstep.world.environments import mpiexec
from lockstep.world.environments.variables import integer
from lockstep.world.model import World

#: What the kernel calls the process of a node that has started this job's processes there.
_PROXIES = ("hydra_pmi_proxy", "pmi_proxy", "mpiexec.gforker")


def detect(environ: Mapping[str, str]) -> World | None:
    """Return the world that Hydra's variables describe, or `None` without them.

    `srun` may set the same variables, as the process manager of an MPI program; then the world is
    Slurm's.

    Raises:
        WorldError: if a variable is missing or contradicts another.
    """
    if "PMI_RANK" not in environ and "PMI_SIZE" not in environ:
        _refuse_ports(environ)
        return None
    if _set_by_srun(environ):
        return None
    says_local = "MPI_LOCALRANKID" in environ or "MPI_LOCALNRANKS" in environ
    numbers = mpiexec.Numbers(
        rank=integer(environ, "PMI_RANK"),
        size=integer(environ, "PMI_SIZE"),
        local_rank=integer(environ, "MPI_LOCALRANKID") if says_local else None,
        local_size=integer(environ, "MPI_LOCALNRANKS") if says_local else None,
    )
    return mpiexec.world(
        environ,
        numbers,
        lambda one_node: _key(environ) if one_node else None,
        environment="mpich",
        reason="PMI_RANK is set",
    )


def _set_by_srun(environ: Mapping[str, str]) -> bool:
    pairs = (("SLURM_PROCID", "PMI_RANK"), ("SLURM_STEP_NUM_TASKS", "PMI_SIZE"))
    return all(ours in environ and environ[ours] == environ.get(pmi) for ours, pmi in pairs)


def _refuse_ports(environ: Mapping[str, str]) -> None:
    """Refuse what would otherwise look like as many single processes as there are ranks."""
    if "PMI_PORT" in environ and "PMI_ID" in environ:
        raise WorldError(
            "PMI_PORT and PMI_ID are set, which don't say how many processes there are; "
            "expected PMI_RANK and PMI_SIZE",
            hint="start mpiexec without -pmi-port",
        )


def _key(environ: Mapping[str, str]) -> str | None:
    """Return a name that the processes of this job on this node share, and no others there have."""
    proxy = _find_proxy(environ.get("PMI_FD", ""))
    return None if proxy is None else f"mpich-{proxy.pid}-{proxy.start}"


@dataclass(frozen=True, slots=True)
class _Process:
    """A process; its number may come again, but not with the same start."""

    pid: int
    name: str
    parent: int
    start: str

    @staticmethod
    def of(pid: int) -> _Process | None:
        """Return process `pid`, or `None` where it cannot be seen."""
        try:
            text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            return None
        before, _, after = text.rpartition(")")
        fields = after.split()  # the third field of proc(5) and those that follow
        return _Process(pid, before.partition("(")[2], int(fields[1]), fields[19])


def _find_proxy(descriptor: str) -> _Process | None:
    """Return the process that has started this job's processes on this node.

    It is at the other end of `PMI_FD`, however many shells lie between. A program that starts others
    may have closed that descriptor, and the number may mean another by now.
    """
    ancestors = list(_ancestors())
    peer = _Process.of(_peer(descriptor))
    if peer is not None and (peer in ancestors or peer.name in _PROXIES):
        return peer
    return next((one for one in ancestors if one.name in _PROXIES), None)


def _peer(descriptor: str) -> int:
    """Return the process at the other end of a socket of this host; 0 if there is none to be seen."""
    try:
        number = int(descriptor)
        if not stat.S_ISSOCK(os.fstat(number).st_mode):
            return 0
        with socket.socket(fileno=os.dup(number)) as end:
            return host.peer(end)[0]
    except (OSError, ValueError, OverflowError):
        return 0


def _ancestors() -> Iterator[_Process]:
    process = _Process.of(os.getppid())
    while process is not None:
        yield process
        process = _Process.of(process.parent) if process.parent > 0 else None
