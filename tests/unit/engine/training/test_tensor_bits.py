"""Hashes of tensors: one bit counts, wherever it is; types, and sizes on both sides of each limit."""

from __future__ import annotations

import pytest
import torch

from lockstep.engine.training.tensor_bits import _ROW, _SMALL, bits, read

#: Elements of four bytes: at and above what is hashed byte by byte; several rows with a rest.
SIZES = [0, 1, _SMALL // 4, _SMALL // 4 + 1, 6 * _ROW + 5, 70_000]


@pytest.mark.parametrize("size", SIZES)
def test_equal_tensors_have_equal_hashes(size: int) -> None:
    tensor = torch.randn(size)
    assert read([bits(tensor)]) == read([bits(tensor.clone())])


@pytest.mark.parametrize("size", SIZES[1:])
def test_each_bit_counts(size: int) -> None:
    tensor = torch.randn(size)
    before = read([bits(tensor)])
    for place in {0, size // 2, size - 1}:
        for bit in (0, 31):
            other = tensor.clone()
            other.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(1 << 31)
            assert read([bits(other)]) != before, (place, bit)


@pytest.mark.parametrize("size", SIZES[2:])
def test_the_order_of_elements_counts(size: int) -> None:
    tensor = torch.arange(float(size))
    assert read([bits(tensor)]) != read([bits(tensor.flip(0))])
    swapped = tensor.clone()
    swapped[[0, size - 1]] = swapped[[size - 1, 0]]
    assert read([bits(tensor)]) != read([bits(swapped)])


def test_zeros_of_both_signs_and_numbers_that_are_none_differ() -> None:
    values = [torch.tensor([v]) for v in (0.0, -0.0, float("nan"), float("inf"))]
    assert len(set(read([bits(one) for one in values]))) == 4


@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool, torch.complex64],
)
@pytest.mark.parametrize("size", [7, 50_000])
def test_types(dtype: torch.dtype, size: int) -> None:
    tensor = torch.zeros(size, dtype=dtype)
    other = tensor.clone()
    other[size - 1] = 1
    assert read([bits(tensor)]) != read([bits(other)])


def test_the_place_in_memory_does_not_count() -> None:
    values = torch.randn(20_000)
    shifted = torch.cat([torch.zeros(1), values])[1:]
    assert read([bits(shifted)]) == read([bits(values)])


def test_strides_do_not_count() -> None:
    tensor = torch.randn(120, 130)
    turned = tensor.t().contiguous().t()
    assert turned.stride() != tensor.stride()
    assert read([bits(tensor)]) == read([bits(turned)])
    assert read([bits(torch.randn(3, 4).conj())])
