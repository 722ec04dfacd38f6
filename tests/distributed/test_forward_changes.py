"""What forward passes change besides activations: the same on every layout, or refused at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from lockstep.testing import RankError, assert_same, run_ranks
from tests.distributed.jobs import classes, quiet_run

pytestmark = pytest.mark.ranks(3)


class Remembering(nn.Module):
    """Has a buffer of what it saw."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.layer, self.what = nn.Linear(6, 4), what
        self.register_buffer("seen", torch.zeros(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.what == "grows":
            self.seen = torch.cat([self.seen, y.detach()])
        elif self.training:
            self.seen = self.seen + y.detach().mean(0)
        return y


def train(make: Callable[..., nn.Module], *args: Any) -> str:
    """Two epochs, each with an evaluation."""
    with quiet_run() as run:
        model = run.model(make(*args))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        data = run.loader(classes(24, (6,)), batch_size=9, shuffle=True)
        for _ in run.epochs(2):
            model.train()
            for x, y in data:
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            model.eval()
            with torch.no_grad():
                run.mean(model(x).argmax(1) == y for x, y in data)
        return run.digest()


def test_spectral_norm_goes_on_working() -> None:
    assert_same(train, [1, 2, 3], spectral, replicas=3)


def spectral() -> nn.Module:
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 4))


def test_a_buffer_that_grows_is_named_on_several_ranks() -> None:
    with pytest.raises(RankError, match="buffer seen of Remembering changed its shape"):
        run_ranks(train, 2, Remembering, "grows", timeout=30)


def test_buffers_that_training_changes_are_replica_zeros() -> None:
    assert_same(train, [1, 2, 3], Remembering, "adds", replicas=3)


def pruned() -> str:
    """Weights are pruned between epochs: a buffer appears, and a parameter has another name."""
    with quiet_run() as run:
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 4))
        net.eval()  # batches of one
        model = run.model(net)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        data = run.loader(classes(24, (6,)), batch_size=9, shuffle=True)
        for epoch in run.epochs(3):
            if epoch == 1:
                prune.l1_unstructured(net[0], "weight", 0.5)
            if epoch == 2:
                prune.remove(net[0], "weight")
            for x, y in data:
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        return run.digest()


def test_pruning_between_epochs() -> None:
    assert_same(pruned, [1, 2, 3], replicas=3)


def prune_shards() -> None:
    with quiet_run(strategy="fsdp", replicas=2) as run:
        model = run.model(nn.Linear(6, 4))
        prune.l1_unstructured(model, "weight", 0.5)


def test_pruning_what_is_cut_over_ranks() -> None:
    with pytest.raises(RankError, match="of which each rank holds a part") as caught:
        run_ranks(prune_shards, 2)
    assert "prune before run.model" in str(caught.value)
