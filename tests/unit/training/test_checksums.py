"""Checksums of a state: other bits are seen, whatever their size and place."""

from __future__ import annotations

import pytest
import torch

from lockstep.training.checksums import Checksums, checksum

#: Below, at and above what is added in rows of 8 KiB.
SIZES = (1, 2047, 2048, 4096, 4097, 50_001)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64])
def test_other_bits_are_seen(size: int, dtype: torch.dtype) -> None:
    ones = torch.ones(size, dtype=dtype)
    assert checksum(ones) == checksum(ones.clone())
    assert checksum(ones) != checksum(ones * 2), "a constant"
    for place in {0, size // 2, size - 1}:
        other = ones.clone()
        other[place] = 3
        assert checksum(other) != checksum(ones)


@pytest.mark.parametrize("size", SIZES[1:])
def test_the_order_counts(size: int) -> None:
    values = torch.arange(size, dtype=torch.float32)
    assert checksum(values) != checksum(values.flip(0))


def test_the_same_values_elsewhere_in_memory() -> None:
    values = torch.randn(20_000)
    shifted = torch.cat([torch.zeros(1), values])[1:]
    assert checksum(shifted) == checksum(values)
    assert checksum(values.view(100, 200).t().contiguous().t()) == checksum(values.view(100, 200))


def test_what_differs_is_named() -> None:
    def state(weight: float, count: int) -> Checksums:
        models = {"0": {"weight": torch.full((4,), weight), "bias": torch.zeros(4)}}
        registered = {"seen": {"count": count}}
        return Checksums.of({"models": models, "optimizers": {}, "registered": registered})

    assert state(1.0, 1).brief() == state(1.0, 1).brief()
    assert state(1.0, 1).differing(state(2.0, 1)) == ["models.0.weight"]
    assert state(1.0, 1).differing(state(1.0, 2)) == ["numbers"]
