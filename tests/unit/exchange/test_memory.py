"""Memory that is kept from pass to pass."""

from __future__ import annotations

import torch

from lockstep.exchange.memory import Memory


def take(memory: Memory, *sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    like = torch.empty(0, dtype=dtype)
    taken = [memory.take(like, size) for size in sizes]
    memory.pass_ends()
    return taken


def pointers(tensors: list[torch.Tensor]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_a_pass_gets_the_memory_of_the_one_before() -> None:
    memory = Memory()
    first = take(memory, 5, 7)
    assert [tensor.numel() for tensor in first] == [5, 7]
    assert pointers(take(memory, 5, 7)) == pointers(first)
    assert len({*pointers(first)}) == 2


def test_buckets_that_change_get_memory_of_their_own_size() -> None:
    memory = Memory()
    first = take(memory, 5, 7)
    second = take(memory, 5, 8, 9)
    assert [tensor.numel() for tensor in second] == [5, 8, 9]
    assert second[0].data_ptr() == first[0].data_ptr()
    (other,) = take(memory, 5, dtype=torch.float64)
    assert other.dtype == torch.float64
