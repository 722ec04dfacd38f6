"""Gradients of several types have one norm, however the model is held (A13)."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.testing import run_ranks
from tests.distributed.jobs import classes, quiet_run

pytestmark = pytest.mark.ranks(2)


class To(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x).to(self.dtype)


def layers() -> list[nn.Module]:
    """Linear layers of two types, in turn."""
    types = (torch.float64, torch.float32)
    found: list[nn.Module] = []
    for number in range(6):
        dtype = types[number % 2]
        found += [To(dtype), nn.Linear(6, 6, dtype=dtype)]
    return [*found, To(torch.float64), nn.Linear(6, 4, dtype=torch.float64)]


def train_mixed(strategy: str) -> tuple[str, list[str]]:
    """Train with a norm that is always clipped; return the digest, and the norm of each step."""
    settings = {"wrap": [nn.Linear]} if strategy == "fsdp" else {}
    with quiet_run(strategy=strategy) as run:
        model = run.model(layers(), **settings)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        norms = []
        for x, y in run.loader(classes(128, (6,)), batch_size=8, shuffle=True):
            run.backward(F.cross_entropy(model(x), y))
            norms.append(run.clip_grad_norm_(model, 1e-2).double().item().hex())
            optimizer.step()
            optimizer.zero_grad()
        return run.digest(), [norm for norm in norms if norm != "nan"]


def test_every_strategy_clips_alike() -> None:
    environ = {"LOCKSTEP_REPLICAS": "2"}
    (expected,) = run_ranks(train_mixed, 1, "single", environ=environ)
    assert len(set(expected[1])) == 16
    for strategy in ("ddp", "fsdp", "pipeline"):
        mesh = {"LOCKSTEP_MESH": "1x2"} if strategy == "pipeline" else {}
        found = run_ranks(train_mixed, 2, strategy, environ={**environ, **mesh})
        assert found == [expected] * 2, strategy
