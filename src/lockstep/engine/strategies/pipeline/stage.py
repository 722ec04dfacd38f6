"""`Stage`: a part of a model's forward pass, with its inputs and outputs."""

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
    """A piece of a model.

    Attributes:
        takes: names of its inputs.
        gives: names of its outputs, which it returns as a tuple.
        keeps: names of the values that later stages take from this or earlier stages.
        first: name of its first part in the model.
        last: name of its last part.
    """

    module: nn.Module
    takes: tuple[str, ...]
    gives: tuple[str, ...]
    keeps: tuple[str, ...]
    first: str
    last: str

    @property
    def bytes(self) -> int:
        """How many bytes of parameters it has."""
        return weight(self.module)

    def __str__(self) -> str:
        names = self.first if self.first == self.last else f"{self.first} to {self.last}"
        return f"{names} ({self.bytes / 1e6:.2f} MB)"


@dataclass(frozen=True, slots=True)
class Program:
    """A model as stages.

    Attributes:
        signature: of the model's own `forward`.
        inputs: for each argument, its name as a value.
        fixed: arguments that must have their default values.
    """

    stages: tuple[Stage, ...]
    signature: inspect.Signature
    inputs: dict[str, str]
    fixed: dict[str, Any]

    def only(self, number: int) -> Program:
        """Return the program with one stage's module: others would keep what they use in memory."""
        kept = (
            s if n == number else replace(s, module=nn.Identity())
            for n, s in enumerate(self.stages)
        )
        return replace(self, stages=tuple(kept))

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the values that a call of the model begins with.

        Raises:
            ModelError: for an argument that the stages were not cut for.
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
    """Return how many bytes of parameters a module has."""
    return sum(p.numel() * p.element_size() for p in module.parameters())


def pieces_from(starts: Sequence[int], end: int, split: Sequence[str] | None) -> list[range]:
    """Return neighbouring pieces of `range(end)` that begin at `starts`.

    Raises:
        ModelError: if one that the user has asked for by `split` is empty.
    """
    pieces = [range(a, b) for a, b in zip(starts, [*starts[1:], end], strict=True)]
    if split is not None and not all(len(piece) for piece in pieces):
        raise ModelError(
            f"split is {', '.join(split)}; expected parts in the order in which the model calls them, "
            "each once and not the first"
        )
    return pieces


def find(name: str, names: Sequence[str]) -> int:
    """Return the place of a part that the user has named.

    Raises:
        ModelError: if there is none of that name.
    """
    if name in names:
        return names.index(name)
    raise ModelError(
        f"split names {name!r}, and the model has no such part; expected one of {', '.join(names)}"
    )
