"""kill -9 of a worker at every moment of a run, in one launch: it ends with the same weights."""

from __future__ import annotations

import json
import re

import pytest

pytestmark = pytest.mark.forked

#: Each generation dies at another moment. The last rank kills itself: nothing is told beforehand.
SCRIPT = """
import os, signal, sys, threading
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset
import lockstep
from lockstep.state.checkpoint import dcp, snapshot
from lockstep.engine.exchange import shared_memory
from lockstep.engine.recovery import resume
from lockstep.engine.training import session

MOMENTS = sys.argv[1:]
generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
doomed = os.environ.get("RANK") == "1" and generation < len(MOMENTS)
moment = MOMENTS[generation] if doomed else ""

def die(when):
    if when == moment:
        os.kill(os.getpid(), signal.SIGKILL)

def dying(when, function, calls=1):
    left = [calls]
    def call(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            die(when)
        return function(*args, **kwargs)
    return call

die("start")
shared_memory.SharedMemoryExchange._sum = dying(
    "exchange", shared_memory.SharedMemoryExchange._sum, 4)
# After the half was begun, and before its mark.
snapshot.Snapshots._copy = dying("snapshot", snapshot.Snapshots._copy, 2)
dcp.write_part = dying("checkpoint", dcp.write_part)
resume.SavedState.restore = dying("restore", resume.SavedState.restore)
session.Session.finish = dying("end", session.Session.finish)

def digits(count):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (count,), generator=generator)
    return TensorDataset(torch.randn(count, 4, generator=generator), labels)

with lockstep.Run("kills", replicas=2, progress=False) as run:
    die("open")
    model = run.model(torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(), torch.nn.Linear(8, 3)))
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    train, test = run.loader(digits(48), batch_size=8, shuffle=True), run.loader(digits(9), batch_size=4)
    for epoch in run.epochs(4):
        for x, y in train:
            if run.step == 23:
                die("last step")
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for x, y in test:
                if epoch == 1:
                    die("evaluation")
                model(x)
        run.save(best=run.mean(model(x).mean() for x, y in test).__float__())
"""

MOMENTS = [
    "start",
    "open",
    "exchange",
    "snapshot",
    "restore",
    "checkpoint",
    "evaluation",
    "last step",
    "end",
]


@pytest.fixture
def script(lockstep):
    return lockstep.script(SCRIPT)


def digest(text: str) -> str:
    (found,) = re.findall(r"digest=(sha256:\w+)", text)
    return str(found)


@pytest.mark.wide
def test_a_kill_at_every_moment(lockstep, script):
    undisturbed = lockstep.python(script, *MOMENTS)
    assert undisturbed.code == 0, undisturbed.err
    done = lockstep("run", "-n", "2", "--run-dir", "run", script, *MOMENTS, timeout=120)
    assert done.code == 0, done.err
    assert digest(done.out) == digest(undisturbed.out)
    generations = json.loads((lockstep.directory / "run/run.json").read_text())["generations"]
    # The first one died before it opened a run, the second one while it did: rank 0 may not have got there.
    assert len(MOMENTS) - 1 <= len(generations) <= len(MOMENTS), generations
    assert done.err.count("killed by signal 9") == len(MOMENTS), done.err
    steps = [generation.get("step", 0) for generation in generations]
    assert steps == sorted(steps), "no snapshot was lost"
    # The step after a restart has a snapshot; when the next is due is a matter of time.
    assert steps[-3] < steps[-2] < steps[-1], steps
    lines = (lockstep.directory / "run/events/launcher-0.jsonl").read_text().splitlines()
    told = [json.loads(line) for line in lines]
    expected = [["failure", generation] for generation in range(len(MOMENTS))]
    found = [[one["kind"], one["generation"]] for one in told if one["kind"] == "failure"]
    assert found == expected
    assert [one["generation"] for one in told if one["kind"] == "restart"] == list(
        range(1, len(MOMENTS) + 1)
    )
    assert {one["name"] for one in told if one["kind"] == "failure"} == {"rank 1"}
    assert (told[-1]["kind"], told[-1]["exit_code"]) == ("end", 0)
