"""What fails under `mpiexec` ends, says why, and hangs nobody."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest

from tests.mpi.libraries import Mpi

pytestmark = pytest.mark.ranks(2)

FAULT = """
import os, signal, sys
if "users" in sys.argv:
    from mpi4py import MPI  # the user's own: mpi4py would finalize it at the end
import torch
from train import train

batches = 0

def fault(run):
    global batches
    batches += 1
    if run.world.rank == 1 and batches == 3:
        open("failed", "w").write(str(os.getppid()))
        if sys.argv[1] == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("bad sample 17")

# The worker is forked from a rank that has begun MPI, and outlives it for a while.
train("mpi", fault, workers=int(sys.argv[1] == "kill"))
"""

#: Seconds from a rank's failure to the end of mpiexec.
SOON = 15.0


def fail(mpi: Mpi, *words: str) -> tuple[int, str]:
    """Run the script in which rank 1 fails; return the exit code and what was said."""
    mpi.lockstep.script(FAULT, "fault.py")
    job = mpi.start(2, "fault.py", *words)
    mpi.lockstep.wait_for("failed", seconds=50)
    began = time.monotonic()
    done = mpi.lockstep.finish(job)
    assert time.monotonic() - began < SOON
    return done.code, done.out + done.err


@pytest.mark.wide(beyond=1)
def test_a_rank_that_is_killed(mpi: Mpi) -> None:
    code, _ = fail(mpi, "kill")
    assert code == {"mpich": 9, "openmpi": 137}[mpi.name]


@pytest.mark.wide(beyond=1)
def test_a_rank_that_raises(mpi: Mpi) -> None:
    code, said = fail(mpi, "raise")
    assert code == 1
    assert "ValueError: bad sample 17" in said


@pytest.mark.wide(beyond=1)
def test_a_rank_that_raises_where_the_script_began_mpi(mpi: Mpi) -> None:
    code, said = fail(mpi, "raise", "users")
    assert code == 1
    assert "ValueError: bad sample 17" in said


@pytest.mark.wide(beyond=1)
@pytest.mark.forked
def test_ranks_that_mpiexec_did_not_start(mpi: Mpi) -> None:
    env = {**mpi.variables, "LOCKSTEP_REPLICAS": "2"}
    done = mpi.lockstep("run", "-n", "2", "train.py", "mpi", env=env)
    assert done.code == 2
    assert "the run has 2 ranks, and MPI counts 1; expected the same (mpi4py speaks" in done.err
    assert "hint: start the script by `mpiexec -n 2 python …` of that MPI" in done.err


@pytest.mark.wide
def test_the_mpiexec_of_another_library(library: Callable[[str], Mpi]) -> None:
    mine, other = library("mpich"), library("openmpi")
    mine.lockstep.script("import lockstep; lockstep.Run('small', exchange='mpi')")
    done = mine(2, "train.py", **other.variables, PYTHONWARNINGS="ignore")
    assert done.code != 0
    assert "the run has 2 ranks, and MPI counts 1" in done.err
    assert "Open MPI" in done.err


@pytest.mark.forked
def test_no_library(library: Callable[[str], Mpi]) -> None:
    mpi = library("mpich")
    mpi.lockstep.script("from lockstep.world import mpi; mpi.library()")
    nowhere = {**mpi.variables, "MPI4PY_LIBMPI": os.devnull}
    done = mpi.lockstep.python("train.py", env=nowhere)
    assert "WorldError: mpi4py finds no MPI library" in done.err
    assert "pip install mpich" in done.err
