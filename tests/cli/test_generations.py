"""One generation of workers after the other, never two at once, and never more than the budget allows."""

from __future__ import annotations

import time

import pytest

from tests.conftest import Lockstep

#: The command with shorter patience for workers that SIGKILL does not end: all of it is over before TRACER.
LAUNCHER = """
import dataclasses, sys
from lockstep.cli import main
from lockstep.launch.agent import agent, forkserver

forkserver.LAST_GRACE = agent.LAST_GRACE = 0.1
agent.TABLE["shutdown_timeout"] = dataclasses.replace(agent.TABLE["shutdown_timeout"], default=0.1)
sys.exit(main(["run", "-n", "2", "train.py"]))
"""
#: A process that is traced has not ended for its parent before its tracer lets it go.
TRACER = """
import ctypes, pathlib, sys, time
assert ctypes.CDLL(None).ptrace(0x4206, int(sys.argv[1]), 0, 0) == 0  # PTRACE_SEIZE
pathlib.Path("held").write_text("1")
time.sleep(3)
pathlib.Path("released").write_text("1")
"""
SURVIVOR = """
import os, pathlib, signal, subprocess, sys, time
import lockstep

rank, generation = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
with lockstep.Run("survivor", progress=False):
    if generation:
        print("released" if os.path.exists("released") else "overlaps", flush=True)
    elif rank == 1:
        words = [sys.executable, "tracer.py", str(os.getpid())]
        subprocess.Popen(words, start_new_session=True)
        time.sleep(60)
    else:
        while not os.path.exists("held"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.ranks(2)
def test_no_generation_starts_while_a_worker_of_the_one_before_lives(lockstep: Lockstep) -> None:
    lockstep.script(SURVIVOR)
    lockstep.script(TRACER, "tracer.py")
    lockstep.script(LAUNCHER, "launcher.py")
    done = lockstep.python("launcher.py")
    assert done.code == 0, done.err
    assert done.out.startswith("released\n")
    assert "SIGKILL has not ended rank 1 (process " in done.err


BUDGET = """
import os, pathlib, signal, time
import lockstep

generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
status = pathlib.Path(f"/proc/{os.getppid()}/status").read_text()
launcher = int(status.partition("PPid:")[2].split()[0])
with lockstep.Run("budget", replicas=2, progress=False):
    with open(f"generation-{generation}", "a") as file:
        file.write("1")
    last = os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1)
    if generation == 2 and not last:
        os.kill(launcher, signal.SIGKILL)
    if generation != 2 and last:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
"""


@pytest.mark.forked
@pytest.mark.ranks(2)
def test_another_coordinator_goes_on_with_the_same_budget(lockstep: Lockstep) -> None:
    lockstep.script(BUDGET)
    words = ("--nnodes", "1:2", "--rdzv-endpoint", f"file://{lockstep.directory}")
    words += ("--max-restarts", "2", "--last-call", "20", "train.py")
    first = lockstep.start("run", *words)
    time.sleep(1.0)  # it leads
    second = lockstep.start("run", *words)
    done = lockstep.finish(second)
    lockstep.finish(first)
    assert done.code == 1, done.err
    generations = sorted(path.name for path in lockstep.directory.glob("generation-*"))
    assert generations == [f"generation-{number}" for number in range(4)], done.err
