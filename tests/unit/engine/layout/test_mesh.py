"""The ranks of a run as a rectangle."""

from __future__ import annotations

import pytest

from lockstep.engine.layout.mesh import Mesh, choose, parse
from lockstep.errors import UsageError


def test_neighbouring_ranks_hold_one_model() -> None:
    mesh = Mesh(data=2, model=3)
    assert mesh.size == 6
    assert [mesh.place(rank) for rank in range(6)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
        (1, 2),
    ]


def test_parse() -> None:
    assert parse("2x3", "mesh") == Mesh(2, 3)
    assert str(Mesh(2, 3)) == "2x3"


@pytest.mark.parametrize(
    "text", ["", "2", "2x", "x2", "2x2x2", "0x2", "2x0", "-1x2", "2 x 2", "axb"]
)
def test_what_spells_no_mesh(text: str) -> None:
    with pytest.raises(UsageError, match="expected DATAxMODEL"):
        parse(text, "mesh")


@pytest.mark.parametrize(
    ("asked", "strategy", "size", "mesh"),
    [
        (None, "auto", 4, Mesh(4)),
        (None, "fsdp", 4, Mesh(4)),
        (None, "pipeline", 4, Mesh(1, 4)),
        (None, "tensor", 2, Mesh(1, 2)),
        ("2x2", "pipeline", 4, Mesh(2, 2)),
        ("4x1", "ddp", 4, Mesh(4)),
    ],
)
def test_choose(asked: str | None, strategy: str, size: int, mesh: Mesh) -> None:
    assert choose(asked, strategy, size) == mesh


def test_a_mesh_that_does_not_multiply_to_the_world() -> None:
    with pytest.raises(UsageError, match="a mesh of 2x2 has 4 ranks; the run has 3"):
        choose("2x2", "pipeline", 3)


def test_a_mesh_that_the_strategy_cannot_use() -> None:
    with pytest.raises(UsageError, match="strategy=ddp gives each rank a whole one"):
        choose("2x2", "ddp", 4)
