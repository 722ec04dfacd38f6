"""Passes through stages, on a row of one rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from lockstep.engine.strategies.pipeline.consistency import CallCheck
from lockstep.engine.strategies.pipeline.p2p import RowCommunicator
from lockstep.engine.strategies.pipeline.partition import cut
from lockstep.engine.strategies.pipeline.schedule import Schedule
from lockstep.errors import StepError


class Failing(nn.Module):
    """Fails with an input of ones, and in backward passes from an input of twos."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if (x == 1).all():
            raise ValueError("no output today")
        x = x * 1
        if (x == 2).all():
            x.register_hook(self.fail)
        return x

    @staticmethod
    def fail(_gradient: torch.Tensor) -> None:
        raise ValueError("no gradient today")


@pytest.mark.parametrize("bad", [1.0, 2.0], ids=["forward", "backward"])
def test_a_pass_after_one_that_failed(lone_group: Any, bad: float) -> None:
    row = RowCommunicator(lone_group, torch.device("cpu"))
    program = cut(nn.Sequential(nn.Identity(), Failing()), 1, None)
    model = Schedule(program, row, (1, None), CallCheck(row, 0, "Net"))
    x = torch.full((3,), bad, requires_grad=True)
    model(x * 3).sum().backward()
    with pytest.raises(ValueError, match="today"):
        model(x).sum().backward()
    for _ in range(2):
        with pytest.raises(StepError, match="a pass through Net was interrupted by an exception"):
            model(x * 3)
