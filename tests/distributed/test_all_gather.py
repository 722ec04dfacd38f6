"""Losses over all samples of a global batch: gathered features, and gradients of each replica's own."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.errors import StepError
from lockstep.testing import assert_same
from tests.distributed.jobs import quiet_run

pytestmark = pytest.mark.ranks(3)


def views() -> TensorDataset:
    """Thirty-five pairs of views: with batches of 16 the last has fewer samples than 4 replicas."""
    return TensorDataset(torch.randn(35, 2, 6, generator=torch.Generator().manual_seed(0)))


def contrast(z: torch.Tensor) -> torch.Tensor:
    logits = F.normalize(z[:, 0], dim=1) @ F.normalize(z[:, 1], dim=1).T / 0.2
    return F.cross_entropy(logits, torch.arange(len(z)))


def train(dropout: float, strategy: str = "auto") -> tuple[str, list[float]]:
    with quiet_run(replicas=4, strategy=strategy) as run:
        net = nn.Sequential(nn.Linear(6, 8), nn.Dropout(dropout), nn.Tanh(), nn.Linear(8, 4))
        plain = copy.deepcopy(net)
        model = run.model(net)
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.5))
        data = run.loader(views(), batch_size=16)
        for _ in run.epochs(2):
            for batch in run.batches(data):
                features = run.all_gather(lambda pair: model(pair[0]), batch)
                for (x,) in batch:
                    own = model(x)
                    if len(features[run.batch_rows]):  # no stand-in: drawn as it was gathered
                        assert torch.equal(own, features[run.batch_rows])
                    rows = features.clone()
                    rows[run.batch_rows] = own
                    run.backward(contrast(rows) * len(rows) / len(own))
                    optimizer.step()
                    optimizer.zero_grad()
        if not dropout and strategy == "auto":
            expect(plain, model)
        return run.digest(), [round(float(p.double().sum()), 9) for p in plain.parameters()]


def expect(plain: nn.Module, trained: nn.Module) -> None:
    """Train as a single process does whose microbatch is the batch, and compare."""
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    (pairs,) = views().tensors
    for _ in range(2):
        for start in range(0, 35, 16):
            contrast(plain(pairs[start : start + 16])).backward()
            optimizer.step()
            optimizer.zero_grad()
    for ours, theirs in zip(trained.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_gradient_is_that_of_the_whole_batch(dropout: float) -> None:
    assert_same(train, [1, 2, 3], dropout, replicas=4)


@pytest.mark.wide
def test_with_a_sharded_model() -> None:
    assert_same(train, [1, 2], 0.3, "fsdp", replicas=4)


def test_what_is_refused() -> None:
    with quiet_run(replicas=2) as run:
        model = run.model(nn.Linear(6, 3))
        data = run.loader(views(), batch_size=16)
        with pytest.raises(StepError, match=r"run\.all_gather was given a Loader"):
            run.all_gather(model, data)  # type: ignore[arg-type]
        with pytest.raises(StepError, match=r"run\.batch_rows was called outside of a loop"):
            run.batch_rows  # noqa: B018 - asking is what is refused
        for batch in run.batches(data):
            for _ in batch:
                with pytest.raises(StepError, match="called inside a microbatch"):
                    run.all_gather(model, batch)
            break


@pytest.mark.parametrize(
    ("rows", "seen"),
    [
        (lambda out: [out], "returned a list"),
        (lambda out: out.mean((0, 1)), r"shape \(3,\) for a microbatch of 8 samples"),
    ],
)
def test_a_function_that_returns_no_rows(rows: Callable[[Any], Any], seen: str) -> None:
    """Also where the script catches the error: other ranks may have none."""
    with pytest.raises(StepError, match=seen), quiet_run(replicas=2) as run:  # noqa: PT012
        model = run.model(nn.Linear(6, 3))
        for batch in run.batches(run.loader(views(), batch_size=16)):
            with contextlib.suppress(StepError):
                run.all_gather(lambda pair: rows(model(pair[0])), batch)
