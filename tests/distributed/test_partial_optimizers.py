"""Optimizers that hold some of a model's parameters, and later others: the same on every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.errors import StepError
from lockstep.testing import RankError, assert_same, run_ranks
from tests.distributed.jobs import classes, quiet_run

pytestmark = pytest.mark.ranks(3)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def unfreeze(settings: dict[str, Any], clears: str = "optimizer") -> str:
    """The head alone, then all: gradients of the rest are those of no step until then."""
    with quiet_run(**settings) as run:
        model = run.model(net())
        parts = list(run._session.models.find(None).module)
        optimizer = run.optimizer(torch.optim.SGD(parts[2].parameters(), lr=0.1, momentum=0.9))
        data = run.loader(classes(32, (6,)), batch_size=8, shuffle=True)
        for epoch in run.epochs(3):
            if epoch == 1:
                optimizer.add_param_group({"params": list(parts[0].parameters()), "lr": 0.05})
            for x, y in data:
                run.backward(F.cross_entropy(model(x), y))
                optimizer.step()
                (model if clears == "model" else optimizer).zero_grad()
        return run.digest()


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_the_rest_of_a_model_joins_later(strategy: str) -> None:
    digest = assert_same(unfreeze, [1, 2, 3], {"strategy": strategy}, replicas=3)
    assert digest == run_ranks(unfreeze, 1, {"replicas": 3}, "model")[0]


def forget(set_to_none: bool) -> str:
    """A parameter's part on one rank has no gradient but zeros, and is never cleared."""
    with quiet_run(strategy="fsdp", replicas=2) as run:
        model = run.model(nn.Linear(2, 2, bias=False))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for x, _ in run.loader(classes(8, (2,)), batch_size=4):
            run.backward(model(x)[:, 0].mean())  # the second row is rank 1's part
            optimizer.step()
            if not set_to_none:
                optimizer.zero_grad(set_to_none=False)
        return "done"


def forget_on_each_rank(set_to_none: bool) -> str:
    """Return the error of this rank, which each has by itself."""
    try:
        return forget(set_to_none)
    except StepError as error:
        return str(error)


def test_all_ranks_see_gradients_that_some_have_parts_of() -> None:
    first, second = run_ranks(forget_on_each_rank, 2, True)
    assert "had gradients of an earlier batch" in first
    assert first == second
    assert run_ranks(forget, 2, False) == ["done", "done"]


def accumulate(steps: int) -> None:
    """The plain idiom, by a count of microbatches."""
    with quiet_run() as run:
        model = run.model(net())
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for number, (x, y) in enumerate(run.loader(classes(32, (6,)), batch_size=8)):
            run.backward(F.cross_entropy(model(x), y) / steps)
            if (number + 1) % steps == 0:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    ("ranks", "seen"), [(1, "in some microbatches only"), (2, "earlier batch")]
)
def test_the_idiom_of_accumulation_is_named(ranks: int, seen: str) -> None:
    with pytest.raises(RankError, match=seen) as caught:
        run_ranks(accumulate, ranks, 2, environ={"LOCKSTEP_REPLICAS": "2"})
    assert "the run accumulates by itself" in str(caught.value)
    assert "scheduler" not in str(caught.value)
