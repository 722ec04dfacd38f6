"""Mesh of a run: copies of the model, each over neighbouring ranks."""

from __future__ import annotations

import re
from dataclasses import dataclass

from lockstep.errors import UsageError
from lockstep.registry import STRATEGIES

#: Lockstep's own strategies that spread one model over several ranks.
SPREAD = STRATEGIES.where(lambda one: one.spreads)
_WORD = re.compile(r"(\d+)x(\d+)")


@dataclass(frozen=True, slots=True)
class Mesh:
    """`data` rows of `model` ranks each; the ranks of a row hold one model together.

    Neighbouring ranks make a row: they are on one node wherever that is possible, and talk the most.

    Attributes:
        data: how many models there are, each for a block of replicas.
        model: over how many ranks each of them is spread.
    """

    data: int
    model: int = 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data * self.model

    def place(self, rank: int) -> tuple[int, int]:
        """Return the row of `rank`, and its place in it."""
        return divmod(rank, self.model)

    def __str__(self) -> str:
        return f"{self.data}x{self.model}"


def parse(text: str, where: str) -> Mesh:
    """Return the mesh that `text` spells, such as `2x2`.

    Raises:
        UsageError: if it spells none.
    """
    found = _WORD.fullmatch(text)
    if found is None or "0" in (found[1], found[2]):
        raise UsageError(
            f"{where} is {text!r}; expected DATAxMODEL: how many models, and over how many ranks each",
            hint="for example 2x2: two models of two ranks each",
        )
    return Mesh(int(found[1]), int(found[2]))


def choose(asked: str | None, strategy: str, size: int) -> Mesh:
    """Return the mesh of a run on `size` ranks.

    Without one that is asked for, strategies that cut a model to pieces spread one over all ranks.

    Raises:
        UsageError: if the mesh that was asked for has another number of ranks.
    """
    spreads = STRATEGIES.find(strategy).spreads
    if asked is None:
        return Mesh(1, size) if spreads else Mesh(size)
    mesh = parse(asked, "mesh")
    if mesh.size != size:
        raise UsageError(
            f"a mesh of {mesh} has {mesh.size} ranks; the run has {size}",
            hint=f"start {mesh.size} ranks, or choose a mesh whose numbers multiply to {size}",
        )
    if mesh.model > 1 and not spreads:
        raise UsageError(
            f"a mesh of {mesh} spreads each model over {mesh.model} ranks, and strategy={strategy} "
            "gives each rank a whole one",
            hint=f"strategy={' or '.join(SPREAD)}, or a mesh of {size}x1",
        )
    return mesh
