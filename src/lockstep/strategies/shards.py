"""Tensors cut over ranks: the whole of them, and one's own part."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_cut(value: Any) -> TypeGuard[DTensor]:
    """Whether a tensor is cut over ranks.

    Its module takes half a second to import, and nobody has made one before it was.
    """
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def whole(value: Any) -> Any:
    """Return all of a tensor that is cut over ranks, which call this together; other values as they are."""
    if not isinstance(value, torch.Tensor):
        return value
    value = value.detach()
    return value.full_tensor() if is_cut(value) else value


def whole_of(state: Mapping[str, Any]) -> Any:
    """Return a mapping of the same type with all of each tensor; in host memory, where it was cut.

    A device has room for one such tensor at a time, not for all of a model and its optimizer.
    """
    return type(state)({name: _kept(value) for name, value in state.items()})  # type: ignore[call-arg]


def _kept(value: Any) -> Any:
    return whole(value).cpu() if is_cut(value) else whole(value)


def local(value: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    if not is_cut(value):
        return value
    own: torch.Tensor = value.detach().to_local()  # type: ignore[attr-defined]
    return own


def bytes_here(tensors: Iterable[torch.Tensor]) -> int:
    """Return how many bytes of `tensors` this rank holds; what is on `meta`, another one does."""
    own = map(local, tensors)
    return sum(part.numel() * part.element_size() for part in own if not part.is_meta)


def cut_dimension(like: DTensor) -> int:
    """Return along which dimension a tensor is cut."""
    from torch.distributed.tensor import Shard

    (placement,) = like.placements
    assert isinstance(placement, Shard)
    return placement.dim


def part_of(value: torch.Tensor, like: DTensor) -> DTensor:
    """Return `value`, which every rank has all of, cut as `like` is; nothing is sent."""
    dimension, mesh = cut_dimension(like), like.device_mesh
    length = -(-value.shape[dimension] // mesh.size())
    start = min(mesh.get_local_rank() * length, value.shape[dimension])
    stop = min(start + length, value.shape[dimension])
    own = value.detach().narrow(dimension, start, stop - start)
    own = own.clone(memory_format=torch.contiguous_format)
    return assembled(own.to(local(like).device), like)


def assembled(own: torch.Tensor, like: DTensor) -> DTensor:
    """Return the tensor cut as `like` of which this rank holds `own`."""
    from torch.distributed.tensor import DTensor

    made: DTensor = DTensor.from_local(
        own,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )
    return made
