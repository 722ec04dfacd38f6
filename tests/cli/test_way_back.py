"""A script that is interrupted goes on as if nothing had been, with all that it had computed."""

from __future__ import annotations

import json
import re

import pytest

pytestmark = pytest.mark.forked

HEAD = """
import sys
import torch
import torch.nn.functional as F
from torch import nn
import lockstep

torch.manual_seed(0)
X, Y = torch.randn(48, 4), torch.randint(0, 3, (48,))
DATA = torch.utils.data.TensorDataset(X, Y)

class Box:
    def __init__(self, value=0.0): self.value = value
    def state_dict(self): return {"value": self.value}
    def load_state_dict(self, state): self.value = state["value"]

def start(run, **settings):
    model = run.model(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9))
    train = run.loader(DATA, batch_size=12, shuffle=True)
    return model, optimizer, train
"""

METRICS = """
with lockstep.Run("metrics", replicas=2, progress=False) as run:
    model, optimizer, train = start(run)
    plateau = run.scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0))
    with torch.no_grad():
        first = run.mean(F.cross_entropy(model(x), y) for x, y in train)
    def epoch():
        for x, y in train:
            loss = F.cross_entropy(model(x), y) * first
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()
    for _ in run.epochs(3):
        plateau.step(run.mean(epoch()))
"""

NAMES = """
with lockstep.Run("names", replicas=2, progress=False) as run:
    model, optimizer, train = start(run)
    total = run.register("total", Box())
    for epoch in run.epochs(2):
        for step, (x, y) in enumerate(train):
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        run.print(loss.item(), step)
        with torch.no_grad():
            accuracy = run.mean(model(x).argmax(1) == y for x, y in train)
        total.value += accuracy
    run.print("end", loss.item(), accuracy, epoch)
    total.value += accuracy * (1 + epoch)
    while run.step < 12:
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if run.step >= 12:
                break
    assert run.step == 12, run.step
"""

DIGESTS = """
with lockstep.Run("digests", replicas=2, progress=False) as run:
    model, optimizer, train = start(run)
    total = run.register("total", Box())
    for epoch in run.epochs(3):
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            before = run.digest()
            optimizer.step()
            optimizer.zero_grad()
        total.value += int(before[7:15], 16) / 2**20
"""


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    ("script", "last"),
    [(METRICS, 11), (NAMES, 10), (DIGESTS, 8)],
    ids=["metrics", "names", "digests"],
)
@pytest.mark.ranks(2)
def test_interrupted_anywhere(lockstep, script, last):
    place = lockstep.script(HEAD + script)
    words = ("1", "2,term@6", f"1,term@3,term@{last}", "2,kill@7")
    done = lockstep("verify", place, "--layouts", *words, "--json", timeout=150)
    assert done.code == 0, done.out + done.err
    assert {row["steps"] for row in json.loads(done.out)["layouts"]} == {12}


EVALUATES = """
with lockstep.Run("evaluates", replicas=2, progress=False) as run:
    model, optimizer, train = start(run)
    seen = 0
    for x, y in train:
        seen += len(x)
    for x, y in train:
        run.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.ranks(1)
def test_an_evaluation_by_hand_that_runs_again_is_told(lockstep):
    place = lockstep.script(HEAD + EVALUATES)
    words = ("run", "-n", "1", "--run-dir", "run", place)
    assert lockstep(*words, env={"LOCKSTEP_FAULTS": "term@2"}).code == 75
    done = lockstep(*words)
    assert done.code == 0, done.err
    assert (
        "loops over loader 0 that only evaluate have run again, with the parameters of step 3"
        in (done.err)
    )


SAVES = """
with lockstep.Run("saves", replicas=1, progress=False) as run:
    model, optimizer, train = start(run)
    for epoch in run.epochs(2):
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            run.save()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        run.save(best=1.0 if epoch == 0 else 0.5)
        if epoch == 0:
            raise RuntimeError("after the save")
"""


@pytest.mark.ranks(1)
def test_the_state_that_was_rated_is_kept_through_an_error(lockstep):
    """Saved at the same step before its weights changed, and an exception comes right after."""
    place = lockstep.script(HEAD + SAVES)
    done = lockstep("run", "-n", "1", "--run-dir", "run", "--max-restarts", "0", place)
    assert done.code == 1
    assert "after the save" in done.err
    exported = lockstep("export", "run", "--best", "-o", "best.pt")
    assert exported.code == 0, exported.err
    check = "import torch; assert not any(v.any() for v in torch.load('best.pt').values())"
    assert lockstep.python("-c", check).code == 0
    assert re.search(r"step-00000004\.1", str(sorted(lockstep.directory.glob("run/checkpoints/*"))))
