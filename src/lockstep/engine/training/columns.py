"""`Columns`: sums kept for each replica, so that totals have the same bits on any number of ranks."""

from __future__ import annotations

import io
import operator
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lockstep.engine.layout.tree import total
from lockstep.errors import StepError

ValueT = TypeVar("ValueT")
Addend = torch.Tensor | float | int
#: Shape of a tensor; `None` for a number.
_Shape = tuple[int, ...] | None


class Columns:
    """Named sums that are kept for each replica by itself, in float64, or exact for integers.

    A rank adds values only for the replicas that it computes, `block`.
    """

    def __init__(self, replicas: int, block: range, group: dist.ProcessGroup | None) -> None:
        self._replicas, self._block, self._group = replicas, block, group
        self._columns: dict[str, list[Addend | None]] = {}

    def add(self, name: str, replica: int, value: Addend) -> None:
        """Add `value` to the sum called `name` of the replica number `replica`.

        Raises:
            StepError: if the sum has a different shape than `value`.
        """
        if isinstance(value, torch.Tensor):
            kind = torch.float64 if value.is_floating_point() else torch.int64
            # A copy, since the script may reuse its tensor.
            value = value.as_subclass(torch.Tensor).to(kind, copy=True)
        column = self._columns.setdefault(name, [None] * self._replicas)
        there = column[replica]
        if there is not None:
            _check_shapes(name, [_shape(there), _shape(value)])
        column[replica] = value if there is None else there + value

    def complete(self) -> dict[str, list[Addend | None]]:
        """Return, by name, a list with the sum of every replica; a collective call.

        A replica without values has `None` in the list.

        Raises:
            StepError: if values of one name have different shapes.
        """
        merged: dict[str, list[Addend | None]] = {}
        for columns in of_all(self._columns, self._group):
            for name, column in columns.items():
                before = merged.get(name, [None] * self._replicas)
                pairs = zip(before, column, strict=True)
                merged[name] = [old if new is None else new for old, new in pairs]
        for name, column in merged.items():
            _check_shapes(name, [_shape(value) for value in column if value is not None])
        return merged

    def totals(self) -> dict[str, Any]:
        """Return, by name, sums over all replicas, added in tree order; a collective call."""
        return {
            name: total([0 if v is None else v for v in column], operator.add)
            for name, column in self.complete().items()
        }

    def resume(self, columns: Mapping[str, list[Addend | None]]) -> None:
        """Set the sums of this rank's replicas to `columns`, which `complete` returned before a restart."""
        for name, column in columns.items():
            own = [column[r] if r in self._block else None for r in range(self._replicas)]
            self._columns[name] = own


def _shape(value: Addend) -> _Shape:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _check_shapes(name: str, shapes: list[_Shape]) -> None:
    other = next((shape for shape in shapes if shape != shapes[0]), shapes[0])
    if other != shapes[0]:
        what = f" {name!r}" if name else ""
        raise StepError(
            f"run.sum was given values{what} of the shapes {shapes[0]} and {other}; expected one shape"
        )


def of_all(own: ValueT, group: dist.ProcessGroup | None) -> list[ValueT]:
    """Return a list of the value `own` of every rank, in rank order; a collective call.

    A value consists of tensors, numbers and text, also in lists and mappings. `all_gather_object` is not
    used, since it would unpickle any object.
    """
    if group is None:
        return [own]
    written = io.BytesIO()
    torch.save(own, written)
    data = torch.frombuffer(written.getbuffer(), dtype=torch.uint8)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    longest = max(int(length) for length in lengths)
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in lengths]
    dist.all_gather(parts, nn.functional.pad(data, (0, longest - len(data))), group=group)
    texts = [part[:length].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]
    return [torch.load(io.BytesIO(text), weights_only=True) for text in texts]
