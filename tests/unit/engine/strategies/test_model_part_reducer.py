"""Sums over the ranks of a column: which parameters have a gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.engine.exchange.base import Sum
from lockstep.engine.strategies.model_part_reducer import Reducer


class Doubling:
    """An exchange with a second rank that has the same nodes, and uses all parameters."""

    def slots(self, bucket: torch.Tensor, extra: int = 0) -> list[torch.Tensor]:
        self._extra = extra
        return [bucket.new_empty(bucket.numel() + extra)]

    def start(self, slots: list[torch.Tensor], *, last: bool, place: int = 0) -> Sum:
        total = 2 * slots[0]
        if self._extra:
            total[-self._extra :] = 1
        future: Sum = torch.futures.Future()
        future.set_result(total)
        return future


def sum_of(gradients: list[Any]) -> list[Any]:
    parameters = [torch.zeros(3), torch.zeros(2, dtype=torch.float64)]
    return Reducer(Doubling(), parameters)([gradients], 0)  # type: ignore[arg-type]


def test_no_device_is_waited_for_where_a_rank_has_used_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(_tensor: torch.Tensor) -> None:
        raise AssertionError("reads what other ranks have used")

    monkeypatch.setattr(torch.Tensor, "tolist", wait)
    first, second = sum_of([torch.ones(3), torch.ones(2).double()])
    assert torch.equal(first, torch.full((3,), 2.0))
    assert torch.equal(second, torch.full((2,), 2.0).double())


def test_what_another_rank_has_used_has_a_gradient() -> None:
    _, second = sum_of([torch.ones(3), None])
    assert second is not None
