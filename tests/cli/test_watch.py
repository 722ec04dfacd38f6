"""`lockstep watch`: on a terminal and without one, on a run with kills."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Lockstep
from tests.recorded import Run
from tests.terminal import Terminal

pytestmark = pytest.mark.forked

#: Two ranks that stop at step 40 until a file is there.
SCRIPT = """
import os, time
import torch
import lockstep

with lockstep.Run("small", replicas=2) as run:
    model = run.model(torch.nn.Linear(4, 1))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    loader = run.loader([torch.full((4,), i / 40) for i in range(40)], batch_size=4, shuffle=True)
    for epoch in run.epochs(6):
        for x in loader:
            while run.step >= 40 and not os.path.exists("go"):
                time.sleep(0.02)
            loss = (model(x) - 1).square().mean()
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=loss)
        run.print(f"epoch {epoch} is done")
"""
KILLS = {"LOCKSTEP_FAULTS": "kill@8,kill@22"}


@pytest.fixture
def terminal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Terminal]:
    """A terminal of 100 columns and 30 lines."""
    opened = Terminal(tmp_path_factory.mktemp("t"))
    yield opened
    opened.close()


@pytest.mark.ranks(2)
def test_a_run_with_kills_on_a_terminal(lockstep: Lockstep, terminal: Terminal) -> None:
    lockstep.script(SCRIPT)
    run = lockstep.start("run", "-n", "2", "--run-dir", "runs/small/1", "train.py", env=KILLS)
    lockstep.wait_for("runs/small/1/run.json")
    watch = f"{sys.executable} -m lockstep watch --every 0.1; echo code=$?"
    terminal.type(f"cd {lockstep.directory}")
    terminal.type(watch)
    # Each rank's records, the launcher's and the log are written for themselves: they come in any order.
    terminal.until(r"epoch 4/6 +step 40\b")
    terminal.until(r"small  running  2 ranks on 1 node  2 restarts  runs/small/1")
    terminal.until(r"(?s)(rank 1 was killed by signal 9 \(SIGKILL\).*){2}")
    terminal.until(r"epoch 3 is done")
    terminal.until(r"(?m)^1 +40 ")  # each rank has its line
    terminal.until(r"(?m)%( |$)")
    terminal.keys("q")
    terminal.until("code=0")
    terminal.type("clear; stty -a | grep -c -- -icanon")
    assert re.search(r"^0$", terminal.until(r"(?m)^\d$"), re.MULTILINE), "lines are edited again"
    terminal.type(f"clear; {watch}")
    terminal.until("step 40")
    terminal.keys("C-c")
    terminal.until("code=0")
    terminal.type("clear; echo $((6 * 7))")
    terminal.until(r"(?m)^42$")  # what is seen from here on is not of the picture before
    terminal.type(watch)
    terminal.until("step 40")
    (lockstep.directory / "go").touch()
    text = terminal.until(r"code=\d")
    assert "small  finished" in text
    assert "code=0" in text
    assert lockstep.finish(run).code == 0, "the run has not noticed"


@pytest.mark.ranks(2)
def test_a_run_whose_processes_are_killed(lockstep: Lockstep) -> None:
    lockstep.script(SCRIPT)
    run = lockstep.start("run", "-n", "2", "--run-dir", "run", "train.py", env=KILLS)
    lockstep.wait_for("run/run.json")
    watcher = lockstep.start("watch", "run", "--every", "0.1")
    deadline = time.monotonic() + 30
    lines: list[str] = []
    assert watcher.stdout is not None
    # The step and the epoch come from two events.
    while not any("epoch 4/6  step 40" in line for line in lines):
        assert time.monotonic() < deadline
        lines.append(watcher.stdout.readline())
    assert sum("was killed by signal 9" in line for line in lines) == 2
    assert any("restart 2" in line for line in lines)
    os.kill(run.pid, signal.SIGKILL)
    done = lockstep.finish(watcher)
    assert done.code == 1
    assert done.out.splitlines()[-1].startswith("no process of this run is left; ")
    assert "dead  epoch 4/6  step 40" in done.out


@pytest.mark.wide(beyond=2)
@pytest.mark.parametrize(
    ("status", "code", "last"),
    [
        ("finished", 0, f"sha256:{'ab' * 32}"),
        ("failed", 1, "rank 1 was killed by signal 9 (SIGKILL)"),
        ("preempted", 75, "preempted"),
        ("running", 1, "no process of this run is left"),
    ],
)
def test_runs_that_have_ended(
    tmp_path: Path, lockstep: Lockstep, status: str, code: int, last: str
) -> None:
    Run(tmp_path / "run", status=status, kills=[20]).write()
    done = lockstep("watch", "run")
    assert done.code == code, done
    assert "rank 1 was killed by signal 9 (SIGKILL)" in done.out
    assert done.out.splitlines()[-1].startswith(last)


def test_what_cannot_be_watched(tmp_path: Path, lockstep: Lockstep) -> None:
    (tmp_path / "empty").mkdir()
    cases = {
        (): (2, "there is no run in runs"),
        ("none",): (2, "there is no directory none"),
        ("empty",): (2, "empty has no run.json"),
        ("empty", "--every", "0"): (2, "--every is 0"),
        ("empty", "--rank", "-1"): (2, "--rank is -1"),
        ("empty", "more"): (2, "takes no more"),
    }
    for words, (code, message) in cases.items():
        done = lockstep("watch", *words)
        assert done.code == code, (words, done)
        assert message in done.err.splitlines()[0]
        assert "Traceback" not in done.err


def test_a_reader_that_has_left(tmp_path: Path, lockstep: Lockstep) -> None:
    Run(tmp_path / "run", kills=[20]).write()
    watcher = lockstep.start("watch", "run")
    assert watcher.stdout is not None
    watcher.stdout.close()
    assert watcher.wait(timeout=30) == 0
