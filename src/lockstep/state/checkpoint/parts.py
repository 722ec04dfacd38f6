"""Boxes (rectangular parts) of tensors, the sharding of DTensors, and tensors that are read on demand."""

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
    """A rectangular part of a tensor, given by one offset and one size per dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def whole(shape: tuple[int, ...]) -> Box:
        """Return the box that contains all elements of a tensor of the given shape."""
        return Box((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Number of elements of the box."""
        return prod(self.sizes)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the elements of `tensor` in this box, as a view."""
        for dimension, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            tensor = tensor.narrow(dimension, offset, size)
        return tensor


@dataclass(frozen=True, slots=True)
class Sharding:
    """Division of a tensor along one dimension into `count` parts, one per rank, as by `torch.chunk`."""

    dimension: int
    count: int  # number of parts; rank `k` of the run holds part `k`

    def box(self, shape: tuple[int, ...], part: int) -> Box:
        """Return the box of part number `part` of a tensor with this shape; the box may be empty."""
        length = shape[self.dimension]
        step = -(-length // self.count)
        start = min(part * step, length)
        offsets, sizes = [0] * len(shape), list(shape)
        offsets[self.dimension], sizes[self.dimension] = start, min(step, length - start)
        return Box(tuple(offsets), tuple(sizes))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a checkpoint or snapshot, which is read when needed, as a whole or one box of it."""

    shape: torch.Size
    dtype: torch.dtype
    fetch: Callable[[Box], torch.Tensor]  # returns a copy of the part on the CPU

    @staticmethod
    def of(tensor: torch.Tensor) -> StoredTensor:
        """Return a `StoredTensor` that reads from `tensor`; each part is copied when it is read."""
        return StoredTensor(tensor.shape, tensor.dtype, lambda box: box.of(tensor).clone())

    def read(self) -> torch.Tensor:
        """Read and return the whole tensor."""
        return self.fetch(Box.whole(self.shape))


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Whether a value is a DTensor."""
    # DTensor's module takes half a second to import; before it is imported no DTensor exists.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local(value: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor; any other tensor is returned unchanged."""
    if not is_dtensor(value):
        return value
    with torch.inference_mode(False):  # in it, a parameter that is a DTensor cannot be detached
        own: torch.Tensor = value.detach().to_local()  # type: ignore[attr-defined]
    return own


def cut_of(value: torch.Tensor) -> Sharding | None:
    """Return the sharding of a DTensor over ranks; `None` for a tensor that each rank has as a whole."""
    if not is_dtensor(value):
        return None
    from torch.distributed.tensor import Shard

    (placement,) = value.placements
    if not isinstance(placement, Shard):
        return None
    return Sharding(placement.dim, value.device_mesh.size())


def whole(value: Any) -> Any:
    """Return the whole tensor of a DTensor, gathered from all ranks (collective).

    Any other tensor is detached and returned; other values are returned unchanged.
    """
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return value.full_tensor() if is_dtensor(value) else value
