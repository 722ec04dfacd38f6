"""A script that catches what it should not: the run ends with one verdict, on every layout, at once."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.forked

HEAD = """
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset
import lockstep

X = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
Y = X[:, :4].argmax(1)
X[37] = float("nan")  # of replica 1 in batch 2

class Samples(Dataset):
    def __len__(self): return 96
    def __getitem__(self, i):
        if i == 37: raise ValueError("a broken sample")
        return X[i], Y[i]

def step(x, y):
    loss = F.cross_entropy(model(x), y)
    if CHECKS and torch.isnan(loss): raise ValueError("a bad batch")
    optimizer.zero_grad()
    run.backward(loss)
    optimizer.step()

def main(data):
    global run, model, optimizer
    with lockstep.Run("t", replicas=4, progress=False, stop_on_nan=not CHECKS) as run:
        model = run.model(nn.Linear(8, 4))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        train = run.loader(data, batch_size=16)
        for epoch in run.epochs(3):
            epoch_of(train)
"""

AROUND_MICROBATCHES = """
def epoch_of(train):
    for x, y in train:
        try:
            step(x, y)
        except Exception as error:
            print("skipped", type(error).__name__)
"""

AROUND_LOOPS = """
def epoch_of(train):
    try:
        for x, y in train:
            step(x, y)
    except Exception as error:
        print("left", type(error).__name__)
"""

SKIPS = """
def epoch_of(train):
    for x, y in train:
        if not torch.isnan(x).any():
            step(x, y)
"""

SCRIPTS = {
    "an error of the script, around microbatches": (
        AROUND_MICROBATCHES,
        True,
        "TensorDataset(X, Y)",
    ),
    "an error of the script, around loops": (AROUND_LOOPS, True, "TensorDataset(X, Y)"),
    "an error of the run, around microbatches": (AROUND_MICROBATCHES, False, "TensorDataset(X, Y)"),
    "an error of the run, around loops": (AROUND_LOOPS, False, "TensorDataset(X, Y)"),
    "an error of a sample, around loops": (AROUND_LOOPS, True, "Samples()"),
    "a microbatch that is skipped": (SKIPS, True, "TensorDataset(X, Y)"),
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.wide(beyond=2)), 4])
@pytest.mark.ranks(4)
def test_a_swallowed_error_ends_the_run(lockstep, script: str, ranks: int) -> None:
    epoch, checks, data = SCRIPTS[script]
    text = f"{HEAD}{epoch}\nCHECKS = {checks}\nmain({data})\n"
    done = lockstep("run", "-n", str(ranks), "--run-dir", "r", lockstep.script(text), timeout=60)
    assert done.code == 1, done.out + done.err
    assert "finished" not in done.out + done.err
    assert done.err.count(f"of {ranks} failed on") == 1, "one verdict"
    recorded = json.loads((lockstep.directory / "r" / "run.json").read_text())
    assert len(recorded["generations"]) == 1, "it would be refused again"
