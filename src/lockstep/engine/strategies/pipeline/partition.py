"""Partition of a model into pipeline stages, one for each rank that holds the model.

An `nn.Sequential` is cut between its modules, any other model between nodes of its graph (`fx_stages.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from lockstep.engine.layout.balance import balance
from lockstep.engine.strategies.pipeline.fx_stages import cut_traced
from lockstep.engine.strategies.pipeline.stage import Program, Stage, find, pieces_from, weight
from lockstep.errors import ModelError, UsageError


def cut(module: nn.Module, count: int, split: Sequence[str] | None) -> Program:
    """Return `module` cut into `count` pipeline stages.

    `split`: names of the submodules with which the second and each later stage begin; by default stages
    get similar bytes of parameters.

    Raises:
        UsageError: if `split` or the model gives a different number of stages than `count`.
        ModelError: if the model cannot be cut, or cannot be cut at `split`.
    """
    if isinstance(split, str) or not isinstance(split, Sequence | None):
        raise UsageError(f"split is {split!r}; expected a list of names of the model's parts")
    if split is not None and len(split) != count - 1:
        raise UsageError(
            f"pipeline stages don't fit ranks: split names {len(split)} places, which makes "
            f"{len(split) + 1} stages; each model has {count} ranks",
            hint=f"name {count - 1} places, or choose another mesh (--mesh DATAxMODEL)",
        )
    if type(module).forward is nn.Sequential.forward:
        program = _cut_row(module, count, split)
    else:
        program = cut_traced(module, count, split)
    _check_shared(module, program)
    return program


class _Call(nn.Module):
    """The modules of one stage of an `nn.Sequential`, called one after the other."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, value: Any) -> tuple[Any]:
        for part in self.parts:
            value = part(value)
        return (value,)


def _cut_row(module: nn.Module, count: int, split: Sequence[str] | None) -> Program:
    # named_children yields a repeated module once.
    children = {name: part for name, part in module._modules.items() if part is not None}
    names, parts = list(children), list(children.values())
    if len(parts) < count:
        raise UsageError(
            f"pipeline stages don't fit ranks: {len(parts)} modules in a row for {count} ranks; "
            "expected at least one for each rank of a model",
            hint="give run.model more modules, or choose another mesh (--mesh DATAxMODEL)",
        )
    if split is None:
        pieces = balance([weight(part) for part in parts], count)
    else:
        pieces = pieces_from([0, *(find(name, names) for name in split)], len(parts), split)
    stages = [
        Stage(
            _Call([parts[place] for place in piece]),
            (f"value{number}",),
            (f"value{number + 1}",),
            (f"value{number + 1}",),
            names[piece.start],
            names[piece.stop - 1],
        )
        for number, piece in enumerate(pieces)
    ]
    return Program(tuple(stages), inspect.signature(module.forward), {"input": "value0"}, {})


def _check_shared(module: nn.Module, program: Program) -> None:
    """Raise a `ModelError` if two stages use one parameter or buffer, which would differ between ranks."""
    names = {id(tensor): name for name, tensor in _tensors(module)}
    owners: dict[int, int] = {}
    for number, stage in enumerate(program.stages):
        for _, tensor in _tensors(stage.module):
            first = owners.setdefault(id(tensor), number)
            if first != number:
                raise ModelError(
                    f"{names[id(tensor)]} is used in stages {first} and {number}; expected every "
                    "parameter and buffer to belong to one stage",
                    hint="cut the model so that one stage has both uses (split=[…]), or untie them",
                )


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()
