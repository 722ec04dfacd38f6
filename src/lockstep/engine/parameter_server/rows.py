"""Layout of several tensors in one row of bytes, the same on a worker and its server.

Tensors keep their strides (such as channels last), since an optimizer's kernels process elements in the
order of memory, and round the last few elements differently from those that fill a vector register.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

#: Rows begin at a cache line, so that every type of element is aligned.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Spec:
    """Type, shape and strides of a tensor; its elements fill the memory without gaps."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Spec:
        """Return the `Spec` of `tensor`; its strides are contiguous if the tensor has gaps."""
        dense = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
        stride = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
        return Spec(tensor.dtype, tuple(tensor.shape), tuple(stride))

    @staticmethod
    def parse(words: Sequence[Any]) -> Spec:
        """Return the `Spec` from `words`, the JSON values that `Spec.words` returned.

        Raises:
            ValueError: if no tensor has these values.
        """
        name, shape, stride = words
        dtype = getattr(torch, str(name), None)
        if not isinstance(dtype, torch.dtype) or len(shape) != len(stride):
            raise ValueError(f"no tensor is {words!r}")
        return Spec(dtype, tuple(map(int, shape)), tuple(map(int, stride)))

    def words(self) -> list[Any]:
        """Return the type, shape and strides as a list of JSON values."""
        return [str(self.dtype).removeprefix("torch."), list(self.shape), list(self.stride)]

    @property
    def numel(self) -> int:
        """Number of elements of the tensor."""
        return int(torch.Size(self.shape).numel())

    @property
    def bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of bytes of a row (flat tensor of bytes) whose elements have one type.

    A complex number counts as two real elements, since torch's addition of complex numbers may change the
    sign of a zero.
    """

    dtype: torch.dtype
    start: int
    stop: int

    def of(self, row: torch.Tensor) -> torch.Tensor:
        """Return the segment's elements in `row`, a tensor of bytes, as a view of their type."""
        return row[self.start : self.stop].view(self.dtype)


class RowLayout:
    """Layout of several tensors in one row of bytes (a flat tensor).

    Attributes:
        segments: ranges of the row whose elements have one type; larger types come first.
        bytes: length of the row.
    """

    def __init__(self, specs: Sequence[Spec]) -> None:
        self.specs = tuple(specs)
        order = sorted(
            range(len(specs)), key=lambda i: (-specs[i].dtype.itemsize, str(specs[i].dtype), i)
        )
        self._starts = [0] * len(specs)
        end, bounds, dtypes = 0, [0], list[torch.dtype]()
        for place in order:
            if dtypes and dtypes[-1] != specs[place].dtype:
                bounds.append(end)
            if not dtypes or dtypes[-1] != specs[place].dtype:
                dtypes.append(specs[place].dtype)
            self._starts[place] = end
            end += specs[place].bytes
        bounds.append(end)
        self.segments = [
            Segment(dtype.to_real(), start, stop)
            for dtype, (start, stop) in zip(dtypes, pairwise(bounds), strict=False)
        ]
        self.bytes = -(-end // _ALIGNMENT) * _ALIGNMENT

    def views(self, row: torch.Tensor) -> list[torch.Tensor]:
        """Return each tensor of the layout as a view of its bytes in `row`."""
        return [
            row[start : start + spec.bytes].view(spec.dtype).as_strided(spec.shape, spec.stride)
            for spec, start in zip(self.specs, self._starts, strict=True)
        ]

    def row(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a new 1-D tensor of bytes that holds the values of `tensors` in this layout."""
        row = torch.zeros(self.bytes, dtype=torch.uint8)
        for place, tensor in zip(self.views(row), tensors, strict=True):
            place.copy_(tensor.detach())
        return row
