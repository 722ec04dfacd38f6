"""Layout of several tensors in one row of bytes, the same on a worker and its server.

Tensors keep their strides (such as channels last), since an optimizer's kernels process elements in the
order of memory, and round the last few elements differently from those that fill a vector register.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch

from lockstep.engine.exchange.flat import dense_stride

#: Rows begin at a cache line, so that every type of element is aligned.
_ALIGNMENT = 64


class Spec(NamedTuple):
    """Type, shape and strides of a tensor; its elements fill the memory without gaps."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class RowLayout:
    """Layout of several tensors in one row of bytes (a flat tensor); larger types come first.

    Attributes:
        bytes: length of the row.
    """

    def __init__(self, specs: Sequence[Spec]) -> None:
        self._specs = specs
        self._starts = [0] * len(specs)
        self._segments: list[tuple[torch.dtype, int, int]] = []
        order = sorted(
            range(len(specs)), key=lambda i: (-specs[i].dtype.itemsize, str(specs[i].dtype), i)
        )
        end = 0
        for dtype, places in groupby(order, key=lambda i: specs[i].dtype):
            start = end
            for place in places:
                self._starts[place] = end
                end += specs[place].bytes
            self._segments.append((dtype.to_real(), start, end))
        self.bytes = -(-end // _ALIGNMENT) * _ALIGNMENT

    @staticmethod
    def of(tensors: Sequence[torch.Tensor]) -> RowLayout:
        """Return a layout for `tensors`; the strides of one with gaps in memory become contiguous."""
        return RowLayout([Spec(t.dtype, tuple(t.shape), dense_stride(t)) for t in tensors])

    @staticmethod
    def parse(words: Sequence[Any]) -> RowLayout:
        """Return the layout that `words` describes, the JSON values that `RowLayout.words` returned."""
        return RowLayout(
            [
                Spec(getattr(torch, name), tuple(shape), tuple(stride))
                for name, shape, stride in words
            ]
        )

    def words(self) -> list[Any]:
        """Return the type, shape and strides of each tensor as JSON values."""
        return [
            [str(dtype).removeprefix("torch."), shape, stride]
            for dtype, shape, stride in self._specs
        ]

    def views(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return each tensor of the layout as a view of its bytes in `row`."""
        return [
            row[start : start + spec.bytes].view(spec.dtype).as_strided(spec.shape, spec.stride)
            for spec, start in zip(self._specs, self._starts, strict=True)
        ]

    def segments(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return the elements of each type in `row`, as flat views; complex numbers as two real ones.

        Torch's addition of complex numbers may change the sign of a zero.
        """
        return [row[start:stop].view(dtype) for dtype, start, stop in self._segments]

    def row(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a new 1-D tensor of bytes that holds the values of `tensors` in this layout."""
        row = torch.zeros(self.bytes, dtype=torch.uint8)
        for place, tensor in zip(self.views(row), tensors, strict=True):
            place.copy_(tensor.detach())
        return row
