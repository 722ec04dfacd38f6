"""What a rank counts as held by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.engine.recovery.state import State, footprint


class Counting(torch.optim.SGD):
    """Counts its steps in an attribute."""

    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1


@pytest.mark.parametrize("is_split", [True, False])
def test_attributes_of_an_optimizer_of_a_split_model_are_named(is_split: bool) -> None:
    parameters = list(nn.Linear(2, 2).parameters())
    held: Any = SimpleNamespace(
        is_split=is_split,
        parameters=parameters,
        optimizer_state=lambda optimizer: optimizer.state_dict(),
    )
    state = State()
    state.models.append(held)
    state.add_optimizer(Counting(parameters, lr=0.1))
    assert state.forgotten_attributes() is None
    state.optimizers[0].step()
    assert state.forgotten_attributes() == ("Counting: count" if is_split else None)


def test_parts_of_a_model_that_other_ranks_hold_are_not_counted() -> None:
    """As in a pipeline, where they are on torch's device `meta`."""
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    module[1].to("meta")
    module[2].to("meta")
    state = State()
    held: Any = SimpleNamespace(module=module, gradient_bytes=0)
    state.models.append(held)
    used = footprint(state, torch.device("cpu"))
    assert used["parameters"] == (4 * 4 + 4) * 4
    assert used["buffers"] == 0
