"""`torch.optim.swa_utils.update_bn` as it is: replica 0's statistics on every rank and layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn

from lockstep.engine.training.digest import digest
from lockstep.testing import assert_same
from tests.distributed.jobs import classes, quiet_run

pytestmark = pytest.mark.ranks(3)


def net() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(6), nn.Flatten(), nn.Linear(30, 4))


def average(kept: str, around: str = "") -> tuple[str, str]:
    """Train, average, and compute the average's statistics; `kept` says what the run knows of it."""
    with quiet_run() as run:
        model = run.model(net())
        averaged: Any = AveragedModel(model)
        if kept == "registered":
            run.register("average", averaged)
        elif kept == "held":
            averaged = run.model(averaged)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        # The last batch has fewer samples than there are replicas.
        data = run.loader(classes(38, (6, 5)), batch_size=12, shuffle=True)
        for _ in run.epochs(2):
            for x, y in data:
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
            averaged.update_parameters(model)
        update_bn((pair for pair in data) if around else data, averaged)
        assert all(part.momentum == 0.1 for part in averaged.modules() if part_is_norm(part))
        return run.digest(), digest([averaged.state_dict()])


def part_is_norm(part: nn.Module) -> bool:
    return isinstance(part, nn.BatchNorm1d)


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("kept", ["held", "registered", "neither"])
def test_one_state_on_every_layout(kept: str) -> None:
    assert_same(average, [1, 2, 3], kept, replicas=3)


def test_what_a_script_puts_around_the_loader() -> None:
    _, around = assert_same(average, [1, 3], "neither", "generator", replicas=3)
    _, held = assert_same(average, [2], "held", replicas=3)
    assert around == held
