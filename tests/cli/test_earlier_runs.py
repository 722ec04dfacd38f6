"""Messages about earlier runs: another layout's result differs; the directory has no checkpoint."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.forked

SCRIPT = """
import torch
import torch.nn.functional as F
import lockstep

torch.manual_seed(0)
DATA = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,)))
with lockstep.Run("layout", replicas=2, progress=False) as run:
    model = run.model(torch.nn.Linear(4, 3))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=LR))
    for epoch in run.epochs(3):
        scale = 1 + RANKS * run.world.size * (epoch == 2)  # no audit looks there
        for x, y in run.loader(DATA, batch_size=8):
            run.backward(scale * F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.ranks(2)
def test_two_layouts_with_two_results(lockstep):
    said = "ended with different weights"
    place = lockstep.script(SCRIPT.replace("RANKS", "1").replace("LR", "0.1"))
    first, again = lockstep("run", "-n", "1", place), lockstep("run", "-n", "1", place)
    assert (first.code, again.code) == (0, 0), first.err + again.err
    assert said not in first.err + again.err
    other = lockstep("run", "-n", "2", place)
    assert f"(1 rank) {said}" in other.err, other.err
    place = lockstep.script(SCRIPT.replace("RANKS", "0").replace("LR", "0.2"))
    for ranks in ("1", "2"):  # another script: only runs of this one count
        assert said not in lockstep("run", "-n", ranks, place).err


@pytest.mark.ranks(2)
def test_a_learning_rate_that_follows_from_the_number_of_ranks(lockstep):
    place = lockstep.script(SCRIPT.replace("RANKS", "0").replace("LR", "0.1 * run.world.size"))
    assert lockstep("run", "-n", "1", place).code == 0
    other = lockstep("run", "-n", "2", place)
    assert "(1 rank) ended with different weights" in other.err, other.err
    assert "of the same script, arguments, seed, with different settings or data" in other.err


@pytest.mark.ranks(2)
def test_a_directory_without_a_checkpoint(lockstep):
    script = SCRIPT.replace("RANKS", "0").replace("LR", "0.1").replace(", progress=False", "")
    words = ("run", "-n", "2", "--max-restarts", "0", "--run-dir", "here", lockstep.script(script))
    message = "lockstep: the earlier run in here left no checkpoint: beginning at step 0"
    first = lockstep(*words, env={"LOCKSTEP_FAULTS": "kill@2"})
    assert first.code == 1, first.err
    assert message not in first.err
    again = lockstep(*words)
    assert again.code == 0, again.err
    assert again.err.count(message) == 1
    assert "resuming" not in again.err
    assert message not in lockstep(*words, "--fresh").err
