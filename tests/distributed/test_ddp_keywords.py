"""Keywords of DistributedDataParallel whose effect needs several ranks (A2)."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from lockstep.testing import RankError, run_ranks
from tests.distributed import jobs
from tests.distributed.jobs import quiet_run

pytestmark = pytest.mark.ranks(4)

KNOWN = inspect.signature(DistributedDataParallel).parameters


@pytest.mark.wide(beyond=3)
@pytest.mark.parametrize("exchange", ["shared-memory", "tree", "native"])
@pytest.mark.parametrize(
    "keywords",
    [
        {"batched_grad_copy": True},
        {"lazy_bucket_allocation": True},
        {"bucket_cap_mb_list": [1]},
        {"dim": 1, "init_sync": False},
    ],
    ids=lambda keywords: next(iter(keywords)),
)
def test_keywords_that_leave_the_bits_alone(keywords: dict[str, Any], exchange: str) -> None:
    """Of two ranks, since DDP divides by their number where it copies gradients in one go."""
    if not keywords.keys() <= KNOWN.keys():
        pytest.skip("this torch does not have it")
    settings = {"replicas": 4, "exchange": exchange}
    first = run_ranks(jobs.train_conv, 1, {"replicas": 4}, {})
    assert run_ranks(jobs.train_conv, 2, settings, keywords) == first * 2


def test_init_sync() -> None:
    """Ranks whose weights differ before: DDP gives them rank 0's, or leaves them as they are."""
    first, second = run_ranks(differing, 2, {})
    assert first == second
    first, second = run_ranks(differing, 2, {"init_sync": False})
    assert first != second


def test_init_sync_with_exact_is_noticed_at_the_end() -> None:
    with pytest.raises(RankError, match=r"DivergenceError: rank . ends with"):
        run_ranks(differing, 2, {"init_sync": False}, True)


def differing(keywords: dict[str, Any], exact: bool = False) -> float:
    with quiet_run(exact=exact) as run:
        net = nn.Linear(2, 1)
        nn.init.constant_(net.weight, float(os.environ["RANK"]))
        return run.model(net, **keywords).weight.sum().item()


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("name", ["broadcast_buffers", "forward_sync_buffers"])
def test_buffers_of_each_ranks_own(name: str) -> None:
    if name not in KNOWN:
        pytest.skip("this torch does not have it")
    (one, _), (two, _) = run_ranks(running_mean, 2, {})
    assert one == two
    (one, grads), (two, others) = run_ranks(running_mean, 2, {name: False})
    assert one != two
    assert grads == others


@pytest.mark.wide
def test_buffers_of_each_ranks_own_without_trainable_parameters() -> None:
    one, two = run_ranks(frozen_mean, 2, {})
    assert one == two
    one, two = run_ranks(frozen_mean, 2, {"broadcast_buffers": False})
    assert one != two


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(4, {"strategy": "pipeline", "mesh": "2x2"}), (2, {"strategy": "local-sgd"})],
    ids=["pipeline", "local-sgd"],
)
def test_frozen_models_where_those_in_training_must_share(
    ranks: int, settings: dict[str, Any]
) -> None:
    """Every rank holds the whole of a frozen model, and nothing of it meets."""
    means = run_ranks(frozen_mean, ranks, {"broadcast_buffers": False}, settings)
    assert len(set(means)) == 2, "one per replica"


def frozen_mean(keywords: dict[str, Any], settings: dict[str, Any] | None = None) -> float:
    with quiet_run(exact=False, **settings or {}) as run:
        model = run.model(nn.BatchNorm1d(1).requires_grad_(False), **keywords)
        assert run.exactness == ("approximate" if keywords else "exact")
        x = torch.arange(16.0).view(16, 1)
        for (part,) in run.loader(TensorDataset(x), batch_size=8):
            model(part)
        return model.running_mean.item()


def running_mean(keywords: dict[str, Any]) -> tuple[float, float]:
    with quiet_run(exact=False) as run:
        assert run.exactness == "exact"
        model = run.model(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)), **keywords)
        assert run.exactness == ("approximate" if keywords else "exact")
        x = torch.arange(16.0).view(16, 1)
        for (part,) in run.loader(TensorDataset(x), batch_size=8):
            run.backward(model(part).square().mean())
        return model[0].running_mean.item(), model[1].weight.grad.item()
