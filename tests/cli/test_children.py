"""Processes that a script starts inside a Run, and ranks that leave it by themselves."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.conftest import Lockstep

pytestmark = pytest.mark.forked

FORKS = """
import multiprocessing, time
import lockstep

with lockstep.Run("forks", progress=False):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    child.terminate()
    child.join(10)
    print("ended with", child.exitcode, flush=True)
    child.kill()
"""


LEAVES = """
import os, sys, torch, lockstep
with lockstep.Run("leaves", replicas=2, progress=False) as run:
    model = run.model(torch.nn.Linear(4, 2))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for x in run.loader([torch.full((4,), float(i)) for i in range(16)], batch_size=2):
        run.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if run.step == 3 and run.world.rank == 1:
            {"sys": sys.exit, "os": os._exit}[sys.argv[1]](0)
"""


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("way", "seen"),
    [
        ("sys", "(Mismatch|EarlyExit)Error: rank"),  # as at the end of the block
        ("os", "ended inside the run, with exit code 0"),
    ],
)
def test_a_rank_that_leaves_the_run_is_named(lockstep: Lockstep, way: str, seen: str) -> None:
    lockstep.script(LEAVES)
    done = lockstep("run", "-n", "2", "train.py", way)
    assert done.code == 1
    assert re.search("lockstep: rank [01] of 2 failed on ", done.err)
    assert re.search(seen, done.err)
    assert "restart" not in done.err


def test_a_forked_child_ends_when_it_is_told_to(lockstep: Lockstep) -> None:
    lockstep.script(FORKS)
    done = lockstep("run", "train.py")
    assert done.code == 0, done.err
    assert "ended with -15" in done.out


@pytest.mark.ranks(2)
def test_what_was_imported_before_the_fork_is_collected_where_objects_are_counted(lockstep):
    """nanobind, which torch uses from 2.15 on, writes of each that is there when Python has ended."""
    lockstep.script(
        """
import os
from lockstep.launch.agent.processes import extensions_state

extensions_state()["__nb_internals_nanobind_v22_"] = None
launcher = os.getpid()

class Counted:
    def __init__(self, write=os.write):
        self.itself, self.write, self.pid = self, write, os.getpid
    def __del__(self):
        if self.pid() != launcher:
            self.write(1, b"collected ")

counted = Counted()
""",
        "before/sitecustomize.py",
    )
    script = lockstep.script("import lockstep\nlockstep.Run\n")
    done = subprocess.run(  # in an interpreter of its own: it is imported when that starts
        [sys.executable, "-m", "lockstep", "run", "-n", "2", "--tee", "3", str(script)],
        cwd=lockstep.directory,
        env={**os.environ, "PYTHONPATH": str(lockstep.directory / "before")},
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout.count("collected") == 2
