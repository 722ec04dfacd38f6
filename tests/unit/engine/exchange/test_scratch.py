"""Memory that is kept from pass to pass."""

from __future__ import annotations

import torch

from lockstep.engine.exchange.scratch import Scratch


def take(scratch: Scratch, *sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    like = torch.empty(0, dtype=dtype)
    taken = [scratch.take(like, size) for size in sizes]
    scratch.pass_ends()
    return taken


def pointers(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_a_pass_gets_the_memory_of_the_one_before() -> None:
    scratch = Scratch()
    first = take(scratch, 5, 7)
    assert [tensor.numel() for tensor in first] == [5, 7]
    assert pointers(take(scratch, 5, 7)) == pointers(first)
    assert len({*pointers(first)}) == 2


def test_buckets_that_change_get_memory_of_their_own_size() -> None:
    scratch = Scratch()
    first = take(scratch, 5, 7)
    second = take(scratch, 5, 8, 9)
    assert [tensor.numel() for tensor in second] == [5, 8, 9]
    assert second[0].data_ptr() == first[0].data_ptr()
    (other,) = take(scratch, 5, dtype=torch.float64)
    assert other.dtype == torch.float64
