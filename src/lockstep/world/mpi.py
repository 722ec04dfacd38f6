"""Initialize MPI with mpi4py, and finalize or abort it at the end of the process.

`MPI_Finalize` waits for all ranks. A failed rank must not call it, since other ranks may wait for this
rank in a collective. If a process exits without `MPI_Finalize`, `mpiexec` kills the other ranks.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import secrets
import sys
import threading
from typing import Any

from lockstep.errors import WorldError
from lockstep.world import network
from lockstep.world.model import World

#: Size in bytes of rank 0's broadcast of a job name and the addresses of its interfaces.
_BROADCAST = 1 << 14

#: Types of mpi4py, which may not be installed.
Library = Any
Communicator = Any
Request = Any

_failed = threading.Event()


def fail() -> None:
    """Record that a run of this process has failed, so that MPI is aborted at exit."""
    _failed.set()


def has_failed() -> bool:
    """Return whether a run of this process has failed, or its script has raised an exception."""
    return _failed.is_set() or getattr(sys, "last_value", None) is not None


@functools.cache
def library() -> Library:
    """Return the module `mpi4py.MPI`, with MPI initialized.

    Raises:
        WorldError: if mpi4py or an MPI library is not installed.
    """
    ours = "mpi4py.MPI" not in sys.modules
    try:
        import mpi4py

        if ours:
            mpi4py.rc.finalize = False
        from mpi4py import MPI
    except ImportError as error:
        raise WorldError(
            f"mpi4py cannot be imported: {error}", hint="pip install 'torch-lockstep[mpi]'"
        ) from error
    except RuntimeError as error:
        raise WorldError(
            f"mpi4py finds no MPI library: {str(error).splitlines()[-1]}",
            hint="load your cluster's module, `pip install mpich`, or name its directory in MPI4PY_LIBMPI",
        ) from error
    if not MPI.Is_initialized():
        MPI.Init_thread(MPI.THREAD_MULTIPLE)
    atexit.register(_finish, MPI, os.getpid(), ours=ours)
    return MPI


def _finish(mpi: Library, process: int, *, ours: bool) -> None:
    """Finalize MPI at exit, unless a run has failed; after a failure, let MPI end all ranks.

    A process other than `process`, in which MPI was initialized, does nothing. `ours` is whether Lockstep
    imported `mpi4py.MPI` first. If not, mpi4py finalizes MPI itself, so that after a failure `Abort` must
    be called before.
    """
    if os.getpid() != process or mpi.Is_finalized():
        return
    everyone = mpi.COMM_WORLD
    if not has_failed() or everyone.size == 1:
        if ours:
            mpi.Finalize()
    elif not ours:
        # Otherwise mpi4py calls MPI_Finalize, which would wait for ranks that wait for this one.
        sys.stdout.flush()
        sys.stderr.flush()
        everyone.Abort(1)


@functools.cache
def communicator(rank: int, size: int) -> Communicator:
    """Return an MPI communicator for Lockstep alone, in which this process has rank `rank`.

    Raises:
        WorldError: if MPI is not installed, or has a different number of processes.
    """
    mpi = library()
    if mpi.COMM_WORLD.size != size:
        version = mpi.Get_library_version().strip().splitlines()[0].split(",")[0]
        raise WorldError(
            f"the run has {size} ranks, and MPI counts {mpi.COMM_WORLD.size}; expected the same "
            f"(mpi4py speaks {' '.join(version.split())})",
            hint=f"start the script by `mpiexec -n {size} python …` of that MPI",
        )
    # Order by the run's ranks, which may differ from MPI's.
    return mpi.COMM_WORLD.Split(0, rank)


def agree(world: World) -> tuple[str, tuple[str, ...]]:
    """Broadcast from rank 0 a unique job name and the addresses of rank 0; return both on all ranks.

    Raises:
        WorldError: if MPI is not installed.
    """
    try:
        everyone = communicator(world.rank, world.size)
    except WorldError as error:
        raise WorldError(
            f"{world.environment}: there is no rendezvous address for {world.size} ranks, and MPI cannot "
            f"be asked: {error.message}",
            hint="set MASTER_ADDR and MASTER_PORT, or install the extra: "
            "pip install 'torch-lockstep[mpi]'",
        ) from error
    buffer = bytearray(_BROADCAST)
    if world.rank == 0:
        if world.address is not None:
            own = list(network.addresses_of(world.address))
        else:
            known = sorted(network.interfaces(), key=lambda interface: interface.loopback)
            own = [interface.address for interface in known]
        message = json.dumps([secrets.token_hex(16), own]).encode()
        assert len(message) <= _BROADCAST, "more interfaces than hosts have"
        buffer[: len(message)] = message
    everyone.Bcast(buffer, root=0)
    name, addresses = json.loads(buffer.rstrip(b"\0"))
    return str(name), tuple(addresses)
