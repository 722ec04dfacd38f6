"""Offsets of tensors in one row of bytes, the same on a worker and its server.

Tensors keep the order of their elements in memory (channels last, say): an optimizer's kernels go through
them in that order, and round the last few elements of it otherwise than those that fill a vector.
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
    """A tensor without its values.

    Attributes:
        stride: steps in memory between neighbours, without gaps.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(tensor: torch.Tensor) -> Spec:
        """Return the spec of a tensor; one with gaps gets one without."""
        last = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
        dense = last == tensor.numel()
        stride = tensor.stride() if dense else torch.empty(tensor.shape, device="meta").stride()
        return Spec(tensor.dtype, tuple(tensor.shape), tuple(stride))

    @staticmethod
    def parse(words: Sequence[Any]) -> Spec:
        """Return the spec that `words` returned as JSON.

        Raises:
            ValueError: if it describes no tensor.
        """
        name, shape, stride = words
        dtype = getattr(torch, str(name), None)
        if not isinstance(dtype, torch.dtype) or len(shape) != len(stride):
            raise ValueError(f"no tensor is {words!r}")
        return Spec(dtype, tuple(map(int, shape)), tuple(map(int, stride)))

    def words(self) -> list[Any]:
        """Return the spec as values for JSON."""
        return [str(self.dtype).removeprefix("torch."), list(self.shape), list(self.stride)]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return int(torch.Size(self.shape).numel())

    @property
    def bytes(self) -> int:
        """Size in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a row whose elements have one type.

    Complex ones are two real ones each: torch multiplies what it adds to a complex number by a complex one,
    which changes signs of zeros.
    """

    dtype: torch.dtype
    start: int
    stop: int

    def of(self, row: torch.Tensor) -> torch.Tensor:
        """Return its elements in `row`."""
        return row[self.start : self.stop].view(self.dtype)


class Rows:
    """Offsets of several tensors in one row of bytes.

    Attributes:
        segments: parts of one type, the largest elements first.
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
        """Return views of the tensors in `row`."""
        return [
            row[start : start + spec.bytes].view(spec.dtype).as_strided(spec.shape, spec.stride)
            for spec, start in zip(self.specs, self._starts, strict=True)
        ]

    def row(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return a new row with the values of `tensors`."""
        row = torch.zeros(self.bytes, dtype=torch.uint8)
        for place, tensor in zip(self.views(row), tensors, strict=True):
            place.copy_(tensor.detach())
        return row
