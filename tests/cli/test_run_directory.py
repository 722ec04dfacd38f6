"""One launch at a time in a run directory; a directory that is refused is refused on all ranks at once."""

from __future__ import annotations

import os
import signal
import socket

import pytest

from tests.conftest import Lockstep

pytestmark = pytest.mark.forked

SCRIPT = """
import os, pathlib, signal, time, torch, lockstep
from torch import nn

with lockstep.Run("held") as run:
    model = run.model(nn.Linear(4, 1))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs(2):
        for x in run.loader(torch.randn(8, 4), batch_size=4):
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        if epoch == 0 and "WAIT" in os.environ:
            pathlib.Path(f"rank-{run.world.rank}").write_text(str(os.getpid()))
            while not pathlib.Path("go").exists():
                time.sleep(0.02)
"""


@pytest.mark.ranks(2)
def test_a_second_launch_in_the_same_directory_is_refused(lockstep: Lockstep) -> None:
    lockstep.script(SCRIPT)
    first = lockstep.start("run", "-n", "2", "--run-dir", "d", "train.py", env={"WAIT": "1"})
    (worker,) = lockstep.wait_for("rank-0")
    seconds = (
        lockstep("run", "-n", "1", "--run-dir", "d", "train.py"),
        lockstep.python("train.py", env={"LOCKSTEP_RUN_DIR": "d"}),
    )
    for second in seconds:
        assert second.code == 1
        text = second.err.replace(str(lockstep.directory) + "/", "")
        expected = f"the run directory d is in use by another launch: process {first.pid} on "
        assert f"{expected}{socket.gethostname()}; expected one at a time" in text
        assert "hint: wait for its end, or name another directory with --run-dir" in text
    # Its own ranks are no other launch, not even if rank 0 is gone in between.
    os.kill(int(worker), signal.SIGKILL)
    (lockstep.directory / "go").touch()
    done = lockstep.finish(first)
    assert done.code == 0, done.err
    assert not (lockstep.directory / "d/.lock").exists()
    # Said once, and not again after the restart.
    assert done.err.count("replicas is not set, so that 2 ranks mean 2 replicas, and changing") == 1
    assert "replicas is not set" not in second.err


def test_the_directory_of_a_launcher_that_was_killed_is_free(lockstep: Lockstep) -> None:
    lockstep.script(SCRIPT)
    first = lockstep.start("run", "-n", "1", "--run-dir", "d", "train.py", env={"WAIT": "1"})
    lockstep.wait_for("rank-0")
    first.kill()
    lockstep.finish(first)
    (lockstep.directory / "go").touch()
    again = lockstep("run", "-n", "1", "--run-dir", "d", "train.py")
    assert again.code == 0, again.err


@pytest.mark.ranks(2)
def test_a_directory_that_rank_0_refuses_ends_all_ranks_at_once(lockstep: Lockstep) -> None:
    lockstep.script(SCRIPT)
    assert lockstep("run", "-n", "2", "--run-dir", "d", "train.py").code == 0
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    rendezvous = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    ranks = [
        lockstep.start(
            "train.py", env={**rendezvous, "RANK": str(rank), "LOCKSTEP_RUN_DIR": "d"}, program=()
        )
        for rank in range(2)
    ]
    refused, peer = (lockstep.finish(process) for process in ranks)
    assert (refused.code, peer.code) == (1, 1)
    expected = (
        f"the run in {lockstep.directory / 'd'} is finished; expected a new or an unfinished one"
    )
    assert f"lockstep: error: {expected}\n" in refused.err
    assert f"lockstep: error: rank 0 failed: RunDirectoryError: {expected}\n" in peer.err


@pytest.mark.ranks(2)
def test_the_variable_names_the_directory_as_the_flag_does(lockstep: Lockstep) -> None:
    lockstep.script(SCRIPT)
    named = {"LOCKSTEP_RUN_DIR": "d"}
    assert lockstep("run", "-n", "2", "train.py", env=named).code == 0
    assert (lockstep.directory / "d/run.json").exists()
    assert not (lockstep.directory / "runs").exists()
    again = lockstep("run", "-n", "2", "train.py", env=named)
    assert "lockstep: finished already" in again.err
    assert lockstep("run", "-n", "2", "--run-dir", "e", "train.py", env=named).code == 0
    assert (lockstep.directory / "e/run.json").exists()


def test_a_finished_script_with_two_runs_is_not_run_again(lockstep: Lockstep) -> None:
    lockstep.script(
        "import lockstep\n"
        "for number in range(2):\n"
        "    with lockstep.Run('twice') as run:\n"
        "        run.print('run', number)\n"
    )
    words = ("run", "-n", "1", "--run-dir", "d", "train.py")
    assert lockstep(*words).code == 0
    again = lockstep(*words)
    assert (again.code, again.out.count("run ")) == (0, 0), again.err
    assert "lockstep: finished already" in again.err
    (second,) = lockstep.directory.glob("d/*/run.json")
    second.write_text(second.read_text().replace('"finished"', '"failed"'))
    third = lockstep(*words)
    assert (third.code, third.out.count("run ")) == (0, 2), third.err


def test_a_launch_inside_a_rank_does_not_use_the_directory_of_its_run(lockstep: Lockstep) -> None:
    lockstep.script(SCRIPT, "inner.py")
    lockstep.script(
        """
import lockstep, subprocess, sys

with lockstep.Run("outer"):
    words = [sys.executable, "-m", "lockstep", "run", "-n", "1", "inner.py"]
    subprocess.run(words, check=True)
"""
    )
    ran = lockstep("run", "-n", "1", "--run-dir", "d", "train.py")
    assert ran.code == 0, ran.err
    assert len(list(lockstep.directory.glob("runs/inner/*/run.json"))) == 1


def test_checkpoints_without_their_record_are_not_mixed_with_those_of_a_new_run(
    lockstep: Lockstep,
) -> None:
    lockstep.script(SCRIPT.replace("if epoch == 0", "run.save()\n        if epoch == 0"))
    run = ("run", "--run-dir", "d")
    assert lockstep(*run, "train.py").code == 0
    saved = sorted((lockstep.directory / "d/checkpoints").glob("step-*"))
    assert saved
    (lockstep.directory / "d/run.json").unlink()
    refused = lockstep(*run, "train.py")
    assert refused.code == 1
    assert (
        f"{lockstep.directory / 'd'} has checkpoints but no run.json; expected both" in refused.err
    )
    assert "hint: restore run.json, move the checkpoints away, or begin anew" in refused.err
    assert sorted((lockstep.directory / "d/checkpoints").glob("step-*")) == saved
    assert lockstep(*run, "--fresh", "train.py").code == 0
