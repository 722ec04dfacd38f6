"""Shards of tensors: the shard that a rank holds, and reads of saved tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor: where it begins in each dimension, and how long it is there."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        """Return the box that is all of a tensor."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.sizes)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part of `tensor`, in the same memory."""
        for dimension, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dimension, offset, size)
        return tensor


@dataclass(frozen=True, slots=True)
class Cut:
    """How a tensor is cut over ranks: as `torch.chunk` does it."""

    dimension: int
    count: int  # number of parts; rank `k` of the run holds part `k`

    def box(self, shape: tuple[int, ...], part: int) -> Box:
        """Return part `part` of a tensor of this shape; it may be empty."""
        length = shape[self.dimension]
        step = -(-length // self.count)
        start = min(part * step, length)
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[self.dimension], sizes[self.dimension] = start, min(step, length - start)
        return Box(tuple(offsets), tuple(sizes))


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor that was saved, of which each rank reads what it needs."""

    shape: torch.Size
    dtype: torch.dtype
    fetch: Callable[[Box], torch.Tensor]  # returns a part, in memory of its own, on the CPU

    @staticmethod
    def of(tensor: torch.Tensor) -> Stored:
        """Return a `Stored` that copies from a tensor in memory."""
        return Stored(tensor.shape, tensor.dtype, lambda box: box.of(tensor).clone())

    def read(self) -> torch.Tensor:
        """Return all of it."""
        return self.fetch(Box.whole(self.shape))


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether a tensor is a DTensor."""
    # Its module takes half a second to import; before that there is none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    if not is_dtensor(value):
        return value
    with torch.inference_mode(False):  # in it, a parameter that is a DTensor cannot be detached
        own: torch.Tensor = value.detach().to_local()  # type: ignore[attr-defined]
    return own


def cut_of(value: torch.Tensor) -> Cut | None:
    """Return how a tensor is cut over ranks; `None` for one that is whole on each."""
    if not is_dtensor(value):
        return None
    from torch.distributed.tensor import Shard

    (placement,) = value.placements
    if not isinstance(placement, Shard):
        return None
    return Cut(placement.dim, value.device_mesh.size())


def whole(value: Any) -> Any:
    """Return a DTensor gathered from all ranks, which call this together; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return value.full_tensor() if is_dtensor(value) else value
