"""Layout of gradients in a flat tensor, as in a bucket of DistributedDataParallel.

Gradients lie one after the other. A gradient has the strides of its parameter (such as channels last), or
contiguous strides if the parameter has gaps or overlaps in memory. A complex number is two real elements.
The layout is that of `Reducer::initialize_bucket_views` (torch/csrc/distributed/c10d/reducer.cpp).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

#: Shape and stride of a parameter's part of a flat tensor.
Form = tuple[torch.Size, tuple[int, ...]]


class FlatLayout:
    """Offset, shape and strides of each parameter's gradient in a flat tensor.

    Attributes:
        size: number of real elements of all gradients.
    """

    def __init__(self, forms: Iterable[Form]) -> None:
        self.size = 0
        self._places = []
        for shape, stride in forms:
            self._places.append((shape, stride, self.size))
            self.size += shape.numel()

    def of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's gradient as a view of `flat`; a complex one has a last dimension of 2."""
        if flat.is_complex():  # buckets of complex parameters in earlier versions of torch
            flat = as_real(flat).view(-1)
        start = flat.storage_offset()
        return [flat.as_strided(shape, stride, start + at) for shape, stride, at in self._places]


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return a complex tensor as a real one with a last dimension of 2; a real tensor unchanged."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_typed(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return `part`, a view of a flat tensor, as a complex copy if `parameter` is complex.

    For a real parameter return `part` itself.
    """
    # Cloned, since elements inside a flat tensor may not be aligned for the type.
    return torch.view_as_complex(part.clone()) if parameter.is_complex() else part


def shape_in_memory(parameter: torch.Tensor) -> torch.Size:
    """Return a parameter's shape with its dimensions in the order of memory, the outermost first."""
    shape, stride = form(parameter)
    order = sorted(range(len(shape)), key=lambda place: -stride[place])
    return torch.Size([shape[place] for place in order])


def same_layout(one: Form, other: Form) -> bool:
    """Return whether two forms (shape and strides) are equal, apart from dimensions of size 1."""
    first, second = ([pair for pair in zip(*f, strict=True) if pair[0] > 1] for f in (one, other))
    return first == second


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of `tensor`; contiguous ones if it has gaps or overlaps in memory."""
    if torch.ops.aten.is_non_overlapping_and_dense.default(tensor):
        return tensor.stride()
    return torch.empty(tensor.shape, device="meta").stride()


def form(parameter: torch.Tensor) -> Form:
    """Return the shape and strides that the gradient of `parameter` has in a flat tensor."""
    shape, stride = parameter.shape, dense_stride(parameter)
    if not parameter.is_complex():
        return shape, stride
    return torch.Size([*shape, 2]), (*(2 * step for step in stride), 1)
