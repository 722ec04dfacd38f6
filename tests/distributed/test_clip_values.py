"""`run.clip_grad_value_` on whole gradients, however a model is held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from lockstep.testing import run_ranks
from tests.distributed.jobs import classes, quiet_run

pytestmark = pytest.mark.ranks(2)


def train(settings: dict[str, Any], cut: bool = False) -> list[float]:
    """Return a few weights after steps whose gradients are all clipped."""
    with quiet_run(replicas=2, **settings) as run:
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        plan = {"plan": {"0": ColwiseParallel(), "2": RowwiseParallel()}} if cut else {}
        model = run.model(net, **plan)
        optimizer = run.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        for x, y in run.loader(classes(32, (6,)), batch_size=8):
            run.backward(F.cross_entropy(model(x), y))
            run.clip_grad_value_(model, 0.01)
            optimizer.step()
            optimizer.zero_grad()
        state = run._session.models.find(None).state()
        whole = [t.full_tensor() if isinstance(t, DTensor) else t for t in state.values()]
        return [value for one in whole for value in one.flatten().tolist()]


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "pipeline", "tensor"])
def test_the_same_as_on_one_rank(strategy: str) -> None:
    first = run_ranks(train, 1, {})[0]
    cut = strategy == "tensor"
    found = run_ranks(train, 2, {"strategy": strategy, "exact": not cut}, cut)
    assert found[0] == (pytest.approx(first, abs=1e-6) if cut else first)
    assert found[1] == found[0]
