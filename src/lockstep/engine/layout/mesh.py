"""`Mesh`: arrangement of the ranks in rows, each of which has one copy of the model."""

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
    """Arrangement of ranks in `data` rows of `model` ranks; the ranks of a row hold one model together.

    A row is made of neighbouring ranks, which communicate most and are on one node if possible.
    """

    data: int  # number of copies of the model, each of which computes some of the replicas
    model: int = 1  # number of ranks over which each copy is distributed

    @property
    def size(self) -> int:
        """Number of ranks in the mesh."""
        return self.data * self.model

    def place(self, rank: int) -> tuple[int, int]:
        """Return the row of `rank`, and its column (its position in the row)."""
        return divmod(rank, self.model)

    def __str__(self) -> str:
        return f"{self.data}x{self.model}"


def parse(text: str, where: str) -> Mesh:
    """Parse a mesh such as `2x2`; for other texts raise `UsageError`, naming the text's source `where`."""
    found = _WORD.fullmatch(text)
    if found is None or "0" in (found[1], found[2]):
        raise UsageError(
            f"{where} is {text!r}; expected DATAxMODEL: how many models, and over how many ranks each",
            hint="for example 2x2: two models of two ranks each",
        )
    return Mesh(int(found[1]), int(found[2]))


def choose(asked: str | None, strategy: str, size: int) -> Mesh:
    """Return the mesh of a run on `size` ranks: `asked`, such as `2x2`, or the strategy's default.

    Raises:
        UsageError: if `asked` does not have `size` ranks, or does not fit the strategy.
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
