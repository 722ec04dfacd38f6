"""Ranks that stand still: real processes, really stopped or stuck, and the line at which they are."""

from __future__ import annotations

import pytest

from tests.conftest import Done, Lockstep

pytestmark = [pytest.mark.forked, pytest.mark.ranks(2)]

SCRIPT = """
import os, signal, time
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import lockstep

FAULT, RANK = os.environ.get("FAULT", ""), int(os.environ.get("RANK", 0))
FIRST = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"

def spin():
    while True: pass

if FAULT == "before" and RANK == 1:
    time.sleep(1000)
with lockstep.Run("hangs", progress=False) as run:
    model = run.model(nn.Linear(4, 2))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(32, 4), torch.zeros(32, dtype=torch.int64))
    train = run.loader(data, batch_size=8)
    for epoch in run.epochs(2):
        for x, y in train:
            if run.step == 5 and RANK == 1 and FIRST:
                if FAULT == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if FAULT == "spin":
                    spin()
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
"""


def at(code: str) -> str:
    """The line of the script that begins with `code`, as a verdict names it."""
    lines = [line.strip() for line in SCRIPT.splitlines()]
    return f"train.py:{1 + next(n for n, line in enumerate(lines) if line.startswith(code))}"


def run(lockstep: Lockstep, fault: str, *options: str, n: int = 2) -> Done:
    lockstep.script(SCRIPT)
    words = ("run", "-n", str(n), "--hang-timeout", "3", "--run-dir", "here", *options, "train.py")
    return lockstep(*words, env={"FAULT": fault}, timeout=40)


def test_a_stopped_rank_is_named(lockstep: Lockstep) -> None:
    done = run(lockstep, "stop", "--max-restarts", "0")
    assert done.code == 1
    assert "lockstep: rank 1 of 2 on " in done.err
    assert "is stopped (SIGSTOP): no rank has moved for 3 s" in done.err
    assert f"\n  rank 0 waits in run.backward in step 6 at {at('run.backw')} in <mod" in done.err
    assert "\n  stacks: here/logs/rank-0.stacks\n" in done.err
    assert "in backward_begins" not in done.err, "one screen: the rest is in the files"
    assert "train.py" in (lockstep.directory / "here" / "logs" / "rank-0.stacks").read_text()


def test_the_line_of_an_endless_loop_is_named(lockstep: Lockstep) -> None:
    done = run(lockstep, "spin", "--max-restarts", "0")
    assert done.code == 1
    assert " hangs: no rank has moved for 3 s\n" in done.err
    assert f"\n  rank 1 is in step 6 at {at('while')} in spin\n" in done.err
    assert f"\n  rank 0 waits in run.backward in step 6 at {at('run.backw')} in <mod" in done.err
    assert "\n  stacks: here/logs/rank-*.stacks\n" in done.err


def test_a_run_goes_on_after_a_hang(lockstep: Lockstep) -> None:
    done = run(lockstep, "spin")
    assert done.code == 0, done.err
    assert f"lockstep: rank 1 hangs at {at('while')} in spin; restart 1" in done.err
    assert "lockstep: finished steps=8" in done.out + done.err


def test_a_rank_that_never_comes_to_the_run(lockstep: Lockstep) -> None:
    done = run(lockstep, "before", "--max-restarts", "0")
    assert done.code == 1
    assert f"\n  rank 1 has not opened the run yet at {at('time.sleep')} in <module>\n" in done.err
    assert f"\n  rank 0 waits in the start of the run at {at('with lockstep')} in <mod" in done.err
