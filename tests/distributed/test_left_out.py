"""A microbatch whose loss is not finite is left out by `weight=0`, on every layout alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.testing import assert_same
from lockstep.testing.ranks import RankError
from tests.distributed.jobs import quiet_run

pytestmark = pytest.mark.ranks(4)

#: Of the first, the last and two replicas of a batch, and of one that has fewer samples than replicas.
BAD = (1, 15, 18, 30, 50)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.other = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        head = self.head if x[:, 1:].sum() > 0 else self.other  # unused by some replicas
        out: torch.Tensor = head(self.body(x).relu())
        return out


def train(
    bad: float,
    settings: dict[str, Any],
    ddp: dict[str, Any],
    models: int = 1,
    uses_all: bool = False,
) -> str:
    """Train with bad samples, or with good ones in their place that count as little."""
    with quiet_run(**{"replicas": 4, **settings}) as run:
        inputs = torch.randn(50 + 1, 6, generator=torch.Generator().manual_seed(0))
        inputs[list(BAD), 0] = bad
        rows = torch.arange(51)
        data = run.loader(TensorDataset(inputs, rows), batch_size=16)
        held = [run.model(Net(), **ddp) for _ in range(models)]
        parameters = [p for model in held for p in model.parameters()]
        optimizer = run.optimizer(torch.optim.AdamW(parameters, lr=0.01))
        for _ in run.epochs(2):
            for x, row in data:
                logits = torch.stack([model(x) for model in held]).sum(0)
                loss = F.cross_entropy(logits, row % 4)
                if uses_all:
                    loss = loss + 0 * sum(p.sum() for p in parameters)
                is_bad = any(int(one) in BAD for one in row)
                assert is_bad or bool(torch.isfinite(loss))
                run.backward(loss, weight=0 if is_bad else len(x))
                optimizer.step()
                optimizer.zero_grad()
        assert all(bool(p.isfinite().all()) for p in parameters)
        return run.digest()


def test_one_result_on_every_layout() -> None:
    good = assert_same(train, [1], 0.5, {}, {}, replicas=4)
    assert assert_same(train, [1, 2, 3, 4], float("nan"), {}, {}, replicas=4) == good
    assert assert_same(train, [2], float("inf"), {}, {}, replicas=4) == good


@pytest.mark.wide
@pytest.mark.parametrize(
    ("settings", "models"),
    [({"stop_on_nan": True}, 1), ({"precision": "fp16"}, 1), ({"exchange": "tree"}, 2)],
)
def test_with_what_else_there_is(settings: dict[str, Any], models: int) -> None:
    good = assert_same(train, [1], 0.5, settings, {}, models, replicas=4)
    assert assert_same(train, [1, 3], float("nan"), settings, {}, models, replicas=4) == good


def test_a_static_graph_with_a_replica_for_each_rank() -> None:
    # As DDP wants it, every loss uses all parameters.
    static = {"static_graph": True}
    good = assert_same(train, [4], 0.5, {}, static, 1, True, replicas=4)
    assert assert_same(train, [4], float("nan"), {}, static, 1, True, replicas=4) == good


def test_a_model_that_is_split_refuses_it() -> None:
    with pytest.raises(RankError, match=r"Net is split over ranks.*expected a finite loss"):
        assert_same(train, [2], float("nan"), {"strategy": "fsdp"}, {}, replicas=4)
