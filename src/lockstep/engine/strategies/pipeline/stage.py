"""`Stage`: a part of a model's forward pass; `Program`: all stages of a model."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from lockstep.errors import ModelError

LIST_HINT = "give run.model a list of modules, one for each stage"
HINT = f"{LIST_HINT}, or name where to cut: split=[…]"


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a model's forward pass.

    Attributes:
        takes: names of the module's inputs.
        gives: names of the module's outputs, which it returns as a tuple.
        keeps: names of the values that are sent to the next stage, for use there or in later stages.
        first: name of the first submodule of the stage.
        last: name of the last submodule of the stage.
    """

    module: nn.Module
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    keeps: tuple[str, ...]
    first: str
    last: str

    def __str__(self) -> str:
        names = self.first if self.first == self.last else f"{self.first} to {self.last}"
        return f"{names} ({weight(self.module) / 1e6:.2f} MB)"


@dataclass(frozen=True, slots=True)
class Program:
    """A model that is cut into stages.

    Attributes:
        signature: signature of the model's `forward`.
        inputs: for each argument of `forward`, the name that the argument has in `Stage.takes`.
        fixed: for arguments that a call must leave at their default, the default value.
    """

    stages: tuple[Stage, ...]
    signature: inspect.Signature
    inputs: dict[str, str]
    fixed: dict[str, Any]

    def only(self, number: int) -> Program:
        """Return a copy with only the module of stage `number`, to free the memory of other stages."""
        kept = (
            s if n == number else replace(s, module=nn.Identity())
            for n, s in enumerate(self.stages)
        )
        return replace(self, stages=tuple(kept))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a call of the model, by their names in `Stage.takes`.

        `args` and `kwargs` are the arguments of the call. The stages were cut for the default values of the
        arguments in the attribute `fixed`: for such an argument, any other value raises a `ModelError`.
        """
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        for name, value in self.fixed.items():
            given = bound.arguments[name]
            if given is not value and not (type(given) is type(value) and given == value):
                raise ModelError(
                    f"the model was called with another {name} than {value!r}, the default, which its "
                    "stages were cut for",
                    hint="make it an argument without a default, or " + HINT,
                )
        return {value: bound.arguments[name] for name, value in self.inputs.items()}


def weight(module: nn.Module) -> int:
    """Return the number of bytes of a module's parameters."""
    return sum(p.numel() * p.element_size() for p in module.parameters())


def pieces_from(starts: Sequence[int], end: int, split: Sequence[str] | None) -> list[range]:
    """Divide `range(end)` into ranges that begin at `starts`.

    `split`: names of submodules that the user chose as `starts`; then an empty range raises a `ModelError`.
    """
    pieces = [range(a, b) for a, b in zip(starts, [*starts[1:], end], strict=True)]
    if split is not None and not all(len(piece) for piece in pieces):
        raise ModelError(
            f"split is {', '.join(split)}; expected parts in the order in which the model calls them, "
            "each once and not the first"
        )
    return pieces


def find(name: str, names: Sequence[str]) -> int:
    """Return the index of the submodule `name` in `names`; raise a `ModelError` if it is missing."""
    if name in names:
        return names.index(name)
    raise ModelError(
        f"split names {name!r}, and the model has no such part; expected one of {', '.join(names)}"
    )
