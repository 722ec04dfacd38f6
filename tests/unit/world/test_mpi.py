"""How MPI begins and ends in a process; with real ranks: tests/mpi."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lockstep.errors import WorldError
from lockstep.world import World, mpi

NODES = World(rank=0, size=2, by_mpi=True, placed=False, environment="mpich")


@pytest.fixture
def without_mpi4py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    mpi.library.cache_clear()
    mpi.communicator.cache_clear()


@pytest.mark.usefixtures("without_mpi4py")
def test_several_nodes_without_mpi4py() -> None:
    with pytest.raises(
        WorldError, match="mpich: there is no rendezvous address for 2 ranks"
    ) as caught:
        mpi.agree(NODES)
    assert "mpi4py cannot be imported" in str(caught.value)
    assert caught.value.hint is not None
    assert "MASTER_ADDR and MASTER_PORT" in caught.value.hint
    assert "torch-lockstep[mpi]" in caught.value.hint


@pytest.mark.usefixtures("without_mpi4py")
def test_the_extra_is_named() -> None:
    with pytest.raises(WorldError, match="mpi4py cannot be imported") as caught:
        mpi.communicator(0, 2)
    assert caught.value.hint == "pip install 'torch-lockstep[mpi]'"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("pass", "False"),
        ("mpi.fail()", "True"),
        ("raise ValueError", "True"),
        ("raise SystemExit(3)", "False"),
    ],
)
def test_what_counts_as_a_failure_at_the_end(code: str, said: str) -> None:
    script = f"""
import atexit
from lockstep.world import mpi
atexit.register(lambda: print(mpi.has_failed()))
{code}
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stdout.strip() == said


def test_the_module_needs_no_mpi() -> None:
    code = "import sys, lockstep.world.mpi; print('mpi4py' in sys.modules, 'torch' in sys.modules)"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    ).stdout
    assert out.strip() == "False False"
