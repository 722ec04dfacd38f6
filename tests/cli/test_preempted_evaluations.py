"""A signal in a long evaluation: the run saves itself there, and evaluates again when it continues."""

from __future__ import annotations

import re
import signal

import pytest

pytestmark = pytest.mark.forked

SCRIPT = """
import os, sys, time
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import lockstep

X = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, X[:, :4].argmax(1))

class Seen:
    count = 0
    def state_dict(self): return {"count": self.count}
    def load_state_dict(self, state): self.count = state["count"]

def watched(epoch, loader):
    for batch in loader:
        if epoch == 1 and os.environ.get("SLOW"):
            with open(f"batches-{run.world.rank}", "a") as file:
                file.write("x")
            time.sleep(0.1)
        yield batch

with lockstep.Run("t", replicas=2, progress=False, loggers=()) as run:
    layers = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 4)
    model = run.model(nn.Sequential(*layers))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    scheduler = run.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7))
    plateau = run.scheduler(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0))
    seen = run.register("seen", Seen())
    train = run.loader(DATA, batch_size=16, shuffle=True)
    test = run.loader(DATA, batch_size=2)
    for epoch in run.epochs(3):
        model.train()
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
        model.eval()
        with torch.no_grad():
            EVALUATES
"""

IN_A_METRIC = """
            plateau.step(run.mean(F.cross_entropy(model(x), y) for x, y in watched(epoch, test)))
"""
BY_HAND = """
            for x, y in watched(epoch, test):
                predicted = model(x).argmax(1)
            seen.count += 1
            plateau.step(run.mean(F.cross_entropy(model(x), y) for x, y in test))
"""
#: What changes until the evaluation is over, and must not be saved as it is in its middle.
COUNTS = """
            for x, y in watched(epoch, test):
                seen.count += run.world.size == 1 or len(x) > 0
            seen.count = epoch
"""
SWAPS = """
            kept = [p.clone() for p in model.parameters()]
            for p in model.parameters(): p.data.zero_()
            run.mean(F.cross_entropy(model(x), y) for x, y in watched(epoch, test))
            for p, before in zip(model.parameters(), kept): p.data.copy_(before)
"""


def digest(text: str) -> str:
    found = re.search(r"digest=(\S+)", text)
    assert found is not None, text
    return found[1]


def preempted(lockstep, script: str, ranks: int, *, in_evaluation: bool, **env: str) -> None:
    """Send a signal in the evaluation of epoch 1; the run that continues ends as an undisturbed one."""
    place = lockstep.script(SCRIPT.replace("EVALUATES", script.strip()))
    words = ("run", "-n", str(ranks), "--run-dir")
    process = lockstep.start(*words, "r", place, env={**env, "SLOW": "1"})
    lockstep.wait_for("batches-0")
    process.send_signal(signal.SIGTERM)
    first = lockstep.finish(process, 60)
    assert first.code == 75, first.out + first.err
    gone = len((lockstep.directory / "batches-0").read_text())
    assert (gone < 96 // ranks) == in_evaluation, f"{gone} of {96 // ranks} microbatches"
    again = lockstep(*words, "r", place, env=env)
    assert again.code == 0, again.err
    whole = lockstep(*words, "w", place, env=env)
    assert digest(again.out) == digest(whole.out)


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.wide)])
@pytest.mark.parametrize("script", [IN_A_METRIC, BY_HAND], ids=["in a metric", "by hand"])
@pytest.mark.ranks(2)
def test_a_run_is_saved_in_an_evaluation(lockstep, script: str, ranks: int) -> None:
    preempted(lockstep, script, ranks, in_evaluation=True)


@pytest.mark.ranks(2)
def test_a_forward_pass_that_needs_all_ranks(lockstep) -> None:
    preempted(lockstep, IN_A_METRIC, 2, in_evaluation=True, LOCKSTEP_STRATEGY="fsdp")


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.wide)])
@pytest.mark.parametrize("script", [COUNTS, SWAPS], ids=["counts", "swaps weights"])
@pytest.mark.ranks(2)
def test_what_an_evaluation_changes_is_not_saved_in_its_middle(
    lockstep, script: str, ranks: int
) -> None:
    preempted(lockstep, script, ranks, in_evaluation=False)
