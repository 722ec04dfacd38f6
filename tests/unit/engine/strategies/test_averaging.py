"""What optimizers remember, over ranks that remember different things and have seen different numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lockstep.engine.strategies.local_sgd.averaging import (
    average_state,
    describe_state,
    shares_of,
)
from lockstep.errors import ModelError


class TwoRanks:
    """Means over this rank and another one that is made up."""

    rank, size = 0, 2

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._tensors = tensors
        self.shares: list[float] = []

    def of(self, tensors: Sequence[torch.Tensor], shares: Sequence[float]) -> list[torch.Tensor]:
        self.shares = list(shares)
        theirs = list(self._tensors.values())
        return [a * s + b * (1 - s) for a, b, s in zip(tensors, theirs, shares, strict=True)]


def stepped() -> tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]:
    """An optimizer that has used the first of two parameters alone."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    parameters[0].grad = torch.tensor([2.0, 4.0])
    optimizer.step()
    return optimizer, parameters


def average(weights: list[int], other: list[dict[str, Any]], **tensors: torch.Tensor) -> Any:
    """Average with another rank; return the optimizer, its parameters, and this rank's shares."""
    optimizer, parameters = stepped()
    means = TwoRanks(**tensors)
    both = [describe_state(optimizer, parameters), other]
    average_state(optimizer, parameters, both, weights, means)  # type: ignore[arg-type]
    return optimizer, parameters, means.shares


MOMENTUM = ["momentum_buffer", [[2], "float32", None]]


def test_momentum_is_averaged_over_the_ranks_that_have_one() -> None:
    there = dict([MOMENTUM])
    others = {"first": torch.ones(2), "second": torch.full((2,), 5.0)}
    optimizer, parameters, shares = average([4, 4], [there] * 2, **others)
    assert shares == [0.5, 0.0]
    assert torch.equal(optimizer.state[parameters[0]]["momentum_buffer"], torch.tensor([1.5, 2.5]))
    assert torch.equal(optimizer.state[parameters[1]]["momentum_buffer"], torch.full((2,), 5.0))


def test_ranks_weigh_what_they_have_seen() -> None:
    optimizer, parameters, shares = average([3, 1], [dict([MOMENTUM]), {}], first=torch.zeros(2))
    assert shares == [0.75]
    assert torch.equal(optimizer.state[parameters[0]]["momentum_buffer"], torch.tensor([1.5, 3.0]))


@pytest.mark.parametrize(
    ("weights", "has", "shares"),
    [
        ([1, 1], None, [0.5, 0.5]),
        ([2, 6], None, [0.25, 0.75]),
        ([0, 6], None, [0.0, 1.0]),
        ([0, 0], None, [0.5, 0.5]),
        ([2, 3, 6], [True, False, True], [0.25, 0.0, 0.75]),
        ([0, 3, 0], [True, False, True], [0.5, 0.0, 0.5]),
    ],
)
def test_shares(weights: list[int], has: list[bool] | None, shares: list[float]) -> None:
    assert shares_of(weights, has) == shares


def test_values_are_the_first_ranks_that_has_them() -> None:
    optimizer, parameters = stepped()
    state = optimizer.state[parameters[0]]
    state |= {"step": 3, "odd": torch.tensor(7), "none": None, "nan": math.nan}
    own = describe_state(optimizer, parameters)
    other = [
        {**dict([MOMENTUM]), "step": [None, None, 7], "odd": [[], "int64", 5]},
        {"step": [None, None, 5], "odd": [[1], "bool", True]},
    ]
    means: Any = TwoRanks(first=torch.ones(2))
    average_state(optimizer, parameters, [own, other], [1, 1], means)
    assert (state["step"], state["none"]) == (3, None)
    assert torch.equal(state["odd"], torch.tensor(7))
    assert optimizer.state[parameters[1]]["step"] == 5
    assert torch.equal(optimizer.state[parameters[1]]["odd"], torch.tensor([True]))


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (torch.zeros(4, dtype=torch.uint8), r"a tensor of torch\.uint8"),
        (torch.zeros(1, dtype=torch.complex64), r"a tensor of torch\.complex64"),
        ((1, 2), "a tuple"),
        (object(), "a object"),
    ],
)
def test_memory_without_a_mean_is_refused(value: Any, what: str) -> None:
    optimizer, parameters = stepped()
    optimizer.state[parameters[0]]["codes"] = value
    with pytest.raises(ModelError, match=f"remembers codes, {what}, which has no mean"):
        describe_state(optimizer, parameters)
