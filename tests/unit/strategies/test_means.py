"""What optimizers remember, over ranks that remember different things."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from lockstep.errors import ModelError
from lockstep.strategies.means import average_memory, describe_memory


class TwoRanks:
    """Means over this rank and another one that is made up."""

    size = 2

    def __init__(self, **tensors: torch.Tensor) -> None:
        self._tensors = tensors
        self.counts: list[int] = []

    def of(self, tensors: Sequence[torch.Tensor], counts: Sequence[int]) -> list[torch.Tensor]:
        self.counts = list(counts)
        theirs = list(self._tensors.values())
        return [(a + b) / n for a, b, n in zip(tensors, theirs, counts, strict=True)]


def stepped() -> tuple[torch.optim.Optimizer, list[torch.nn.Parameter]]:
    """An optimizer that has used the first of two parameters alone."""
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    parameters[0].grad = torch.tensor([2.0, 4.0])
    optimizer.step()
    return optimizer, parameters


def test_momentum_is_averaged_over_the_ranks_that_have_one() -> None:
    optimizer, parameters = stepped()
    other = [{"momentum_buffer": ([2], "float32")}] * 2
    means = TwoRanks(first=torch.ones(2), second=torch.full((2,), 5.0))
    both = [describe_memory(optimizer, parameters), other]
    average_memory(optimizer, parameters, both, means)  # type: ignore[arg-type]
    assert means.counts == [2, 1]
    assert torch.equal(optimizer.state[parameters[0]]["momentum_buffer"], torch.tensor([1.5, 2.5]))
    assert torch.equal(optimizer.state[parameters[1]]["momentum_buffer"], torch.full((2,), 5.0))


def test_numbers_are_the_first_ranks_that_has_them() -> None:
    optimizer, parameters = stepped()
    optimizer.state[parameters[0]]["step"] = 3
    other = [
        {"momentum_buffer": ([2], "float32"), "step": (None, 7)},
        {"step": (None, 5)},
    ]
    both = [describe_memory(optimizer, parameters), other]
    average_memory(optimizer, parameters, both, TwoRanks(first=torch.ones(2)))  # type: ignore[arg-type]
    assert optimizer.state[parameters[0]]["step"] == 3
    assert optimizer.state[parameters[1]]["step"] == 5


def test_memory_without_a_mean_is_refused() -> None:
    optimizer, parameters = stepped()
    optimizer.state[parameters[0]]["codes"] = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(ModelError, match=r"remembers codes, a tensor of torch\.uint8"):
        describe_memory(optimizer, parameters)
