"""A stage of a pipeline that fails alone: every rank comes to an end, and the stage is named."""

from __future__ import annotations

import re

import pytest

from tests.conftest import Lockstep

pytestmark = [pytest.mark.forked, pytest.mark.ranks(3)]

SCRIPT = """
import os, sys, torch, torch.nn.functional as F, lockstep
from torch import nn
from torch.utils.data import TensorDataset

class Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ValueError("no gradient today")

class Failing(nn.Linear):
    def forward(self, x):
        if run.step == 3 and sys.argv[1] == "forward":
            raise ValueError("no output today")
        if run.step == 3 and sys.argv[1] == "dies":
            os._exit(3)
        x = super().forward(x)
        if run.step == 3 and sys.argv[1] == "unsent":
            return {x}
        return Spoil.apply(x) if run.step == 3 and sys.argv[1] == "backward" else x

with lockstep.Run("fails", replicas=1, strategy="pipeline", progress=False) as run:
    model = run.model([nn.Linear(4, 4), Failing(4, 4), nn.Linear(4, 2)])
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(48, 4), torch.arange(48) % 2)
    for x, y in run.loader(data, batch_size=8, shuffle=True):
        run.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.wide(beyond=2)
@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("forward", r"rank 1 of 3 failed on .*ValueError: no output today"),
        ("backward", r"rank 1 of 3 failed on .*ValueError: no gradient today"),
        ("unsent", r"rank 1 of 3 failed on .*a set would have to go from one stage"),
        ("dies", r"rank 1 of 3 failed on .*exit code 3"),
    ],
)
def test_a_stage_that_fails_alone_is_named(lockstep: Lockstep, how: str, match: str) -> None:
    words = ["-n", "3", "--max-restarts", "0", "--run-dir", "r"]
    done = lockstep("run", *words, lockstep.script(SCRIPT), how, timeout=60)
    assert done.code in (1, 3)
    assert re.search(match, done.err.replace("\n", " ")), done.err
