"""Offsets of gradients in a flat tensor, as in a bucket of DistributedDataParallel.

One gradient follows the other, each in the order in which its parameter lies in memory (channels last,
say), or in the order of its indices where the parameter has gaps or overlaps itself. Complex numbers are
two real ones. It is torch's `Reducer::initialize_bucket_views` (torch/csrc/distributed/c10d/reducer.cpp).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

#: Shape and stride of a parameter's part of a flat tensor.
Form = tuple[torch.Size, tuple[int, ...]]


class Parts:
    """Offsets of the gradients of some parameters in a flat tensor, computed once for all steps.

    Attributes:
        size: how many real numbers the gradients have.
    """

    def __init__(self, forms: Iterable[Form]) -> None:
        self.size = 0
        self._places = []
        for shape, stride in forms:
            self._places.append((shape, stride, self.size))
            self.size += shape.numel()

    def of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the part of `flat` that belongs to each parameter, in the shape that `as_real` gives."""
        if flat.is_complex():  # as buckets of complex parameters were in earlier versions of torch
            flat = as_real(flat).view(-1)
        start = flat.storage_offset()
        return [flat.as_strided(shape, stride, start + at) for shape, stride, at in self._places]


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as real ones, with a last dimension of two; others as they are."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def as_typed(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a part of a flat tensor as numbers of its parameter's type."""
    # A copy: numbers in the middle of others may not be aligned for the type.
    return torch.view_as_complex(part.clone()) if parameter.is_complex() else part


def shape_in_memory(parameter: torch.Tensor) -> torch.Size:
    """Return the shape of a parameter's part, with the dimensions in the order of memory."""
    shape, stride = form(parameter)
    order = sorted(range(len(shape)), key=lambda place: -stride[place])
    return torch.Size([shape[place] for place in order])


def same_layout(one: Form, other: Form) -> bool:
    """Return whether elements lie in the same order: strides of dimensions with one index don't count."""
    first, second = ([pair for pair in zip(*f, strict=True) if pair[0] > 1] for f in (one, other))
    return first == second


def form(parameter: torch.Tensor) -> Form:
    """Return shape and stride of a parameter's part."""
    shape, stride = parameter.shape, parameter.stride()
    if not torch.ops.aten.is_non_overlapping_and_dense.default(parameter):
        stride = torch.empty(shape, device="meta").stride()
    if not parameter.is_complex():
        return shape, stride
    return torch.Size([*shape, 2]), (*(2 * step for step in stride), 1)
