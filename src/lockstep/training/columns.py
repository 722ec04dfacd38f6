"""Sums with a column for each replica: totals have the same bits on every layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import StepError
from lockstep.layout.tree import total

Addend = torch.Tensor | float | int


class Columns:
    """Named sums: a column of one value per replica for each, floats in float64, integers exact.

    Args:
        replicas: number of replicas in all.
        block: those of this rank: it adds to no others.
        group: the process group, or `None` for a single rank.
    """

    def __init__(self, replicas: int, block: range, group: dist.ProcessGroup | None) -> None:
        self._replicas, self._block, self._group = replicas, block, group
        self._columns: dict[str, list[Addend | None]] = {}

    def add(self, name: str, replica: int, value: Addend) -> None:
        """Add a number, or a tensor of the shape of all others of this name.

        Raises:
            StepError: if it has another shape than before.
        """
        if isinstance(value, torch.Tensor):
            value = value.double() if value.is_floating_point() else value.long()
        column = self._columns.setdefault(name, [None] * self._replicas)
        there = column[replica]
        if there is not None:
            _check_shapes(name, [_shape(there), _shape(value)])
        column[replica] = value if there is None else there + value

    def complete(self) -> dict[str, list[Addend]]:
        """Return the columns with what all ranks have added; they call this together.

        Raises:
            StepError: if ranks have added values of different shapes.
        """
        kinds = self._agree()
        flat: dict[str, list[torch.Tensor]] = {"float": [], "int": []}
        for name, (is_float, shape) in kinds.items():
            flat["float" if is_float else "int"].append(
                self._stacked(name, shape, is_float=is_float)
            )
        if self._group is not None:
            for stacks in flat.values():
                self._reduce(stacks)
        taken = {kind: iter(stacks) for kind, stacks in flat.items()}
        return {
            name: _values(next(taken["float" if is_float else "int"]), shape)
            for name, (is_float, shape) in kinds.items()
        }

    def totals(self) -> dict[str, Any]:
        """Return the sum of each column in tree order, the same on all ranks; they call this together."""
        return {name: total(column, lambda a, b: a + b) for name, column in self.complete().items()}

    def resume(self, columns: Mapping[str, list[Addend]]) -> None:
        """Take what `complete` has returned: of each column what belongs to this rank's replicas."""
        for name, column in columns.items():
            own = [column[r] if r in self._block else None for r in range(self._replicas)]
            self._columns[name] = own

    def _agree(self) -> dict[str, tuple[bool, tuple[int, ...] | None]]:
        """Return of each column that any rank has whether it is of floats, and its shape."""
        own = {}
        for name, column in self._columns.items():
            values = [value for value in column if value is not None]
            shape = _shape(values[0]) if values else None
            own[name] = [any(_is_float(value) for value in values), shape]
        if self._group is None:
            return {name: (bool(kind), shape) for name, (kind, shape) in own.items()}  # type: ignore[misc]
        ranks = [json.loads(part) for part in gather_bytes(json.dumps(own).encode(), self._group)]
        agreed = {}
        for name in dict.fromkeys(name for rank in ranks for name in rank):
            kinds = [rank[name] for rank in ranks if name in rank]
            shapes = [None if shape is None else tuple(shape) for _, shape in kinds]
            _check_shapes(name, shapes)
            agreed[name] = (any(is_float for is_float, _ in kinds), shapes[0])
        return agreed

    def _stacked(self, name: str, shape: tuple[int, ...] | None, *, is_float: bool) -> torch.Tensor:
        kind = torch.float64 if is_float else torch.int64
        stacked = torch.zeros((self._replicas, *(shape or ())), dtype=kind)
        for replica, value in enumerate(self._columns.get(name, ())):
            if value is not None:
                stacked[replica] = value
        return stacked

    def _reduce(self, stacks: list[torch.Tensor]) -> None:
        if not stacks:
            return
        flat = torch.cat([stack.reshape(-1) for stack in stacks])
        # Every element is non-zero on one rank at most, so that this adds nothing but zeros.
        dist.all_reduce(flat, group=self._group)
        parts = torch.split(flat, [stack.numel() for stack in stacks])
        stacks[:] = [part.view(stack.shape) for part, stack in zip(parts, stacks, strict=True)]


def _values(stacked: torch.Tensor, shape: tuple[int, ...] | None) -> list[Addend]:
    """Return one value per replica: numbers, or tensors of a shape."""
    return stacked.tolist() if shape is None else list(stacked.unbind(0))


def _shape(value: Addend) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else None


def _is_float(value: Addend) -> bool:
    return (
        value.is_floating_point() if isinstance(value, torch.Tensor) else isinstance(value, float)
    )


def _check_shapes(name: str, shapes: list[tuple[int, ...] | None]) -> None:
    other = next((shape for shape in shapes if shape != shapes[0]), shapes[0])
    if other != shapes[0]:
        what = f" {name!r}" if name else ""
        raise StepError(
            f"run.sum was given values{what} of the shapes {shapes[0]} and {other}; expected one shape"
        )


def gather_bytes(data: bytes, group: dist.ProcessGroup) -> list[bytes]:
    """Return what every rank has given, in rank order."""
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)]), group=group)
    longest = max(int(length) for length in lengths)
    own = torch.zeros(longest, dtype=torch.uint8)
    own[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.zeros_like(own) for _ in range(size)]
    dist.all_gather(parts, own, group=group)
    return [
        part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)
    ]
