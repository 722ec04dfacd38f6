"""Calls that all ranks make together, and that they don't make together: both calls are named, at once."""

from __future__ import annotations

import time

import pytest

from lockstep.testing import RankError, run_ranks
from tests.conftest import Lockstep
from tests.distributed.jobs import quiet_run

pytestmark = [pytest.mark.forked, pytest.mark.ranks(2)]

SCRIPT = """
import os
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import lockstep

FAULT, RANK = os.environ["FAULT"], int(os.environ["RANK"])

with lockstep.Run("together", progress=False) as run:
    model = run.model(nn.Linear(4, 2))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train = run.loader(TensorDataset(torch.randn(16, 4), torch.zeros(16).long()), batch_size=8)

    def fit():
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()

    fit()
    if FAULT == "mean and backward":
        if RANK == 0:
            run.mean(model(x).sum(1) for x, y in train)
        fit()
    if FAULT == "barrier and the end" and RANK == 1:
        run.barrier()
"""


def line(code: str) -> str:
    lines = [line.strip() for line in SCRIPT.splitlines()]
    return f"train.py:{1 + next(n for n, line in enumerate(lines) if line.startswith(code))}"


def calls_of_its_own(twice: bool) -> None:
    import os

    rank = int(os.environ["RANK"])
    with quiet_run() as run:
        run.barrier()
        if twice and rank == 1:
            run.barrier()
        data = run.loader(list(range(8)), batch_size=4)
        if rank == 0 or twice:
            run.sum(batch.sum() for batch in data)
        else:
            run.gather(batch for batch in data)


@pytest.mark.parametrize(
    ("twice", "calls"),
    [(True, ("run.sum", "run.barrier")), (False, ("run.sum", "run.gather"))],
    ids=["a different number of calls", "another call"],
)
def test_calls_that_differ(twice: bool, calls: tuple[str, str]) -> None:
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        run_ranks(calls_of_its_own, 2, twice, timeout=30)
    text = str(caught.value)
    assert "MismatchError: rank " in text
    for rank, call in enumerate(calls):
        assert f"rank {rank} is in {call} at " in text
    assert "test_hangs.py" in text
    assert time.monotonic() - began < 20, "they have asked each other, and not waited"


def test_a_metric_and_a_backward_pass(lockstep: Lockstep) -> None:
    lockstep.script(SCRIPT)
    done = lockstep("run", "-n", "2", "train.py", env={"FAULT": "mean and backward"}, timeout=40)
    assert done.code == 1
    assert f"rank 0 is in run.mean at {line('run.mean')} in <module>" in done.err
    backward = f"rank 1 is in run.backward for batch 0 of loader 0 at {line('run.backward')} in fit"
    assert backward in done.err
    assert "expected the same call on all ranks" in done.err
    assert "hint: every rank must make the same calls in the same order" in done.err
    assert "restart" not in done.err, "it would come again"


def test_a_barrier_and_the_end_of_the_run(lockstep: Lockstep) -> None:
    lockstep.script(SCRIPT)
    done = lockstep("run", "-n", "2", "train.py", env={"FAULT": "barrier and the end"}, timeout=40)
    assert done.code == 1
    assert f"rank 1 is in run.barrier at {line('run.barrier')} in <module>" in done.err
    assert "rank 0 is in the end of the run at train.py:" in done.err
