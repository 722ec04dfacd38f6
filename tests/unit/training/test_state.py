"""What a rank counts as held by itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from lockstep.training.state import State, footprint


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
