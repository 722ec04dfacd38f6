"""What `asdict` and JSON make of dataclasses is made whole again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

import pytest

from lockstep.world.rendezvous.decode import decode


class Colour(StrEnum):
    RED = "red"


@dataclass(frozen=True)
class Leaf:
    colour: Colour = Colour.RED
    numbers: tuple[int, ...] = ()


@dataclass(frozen=True)
class Tree:
    first: Leaf
    others: tuple[Leaf, ...] = ()
    maybe: Leaf | None = None
    kind: Literal["a", "b"] = "a"
    free: Any = None


@pytest.mark.parametrize(
    "value",
    [
        Tree(Leaf()),
        Tree(Leaf(numbers=(1, 2)), (Leaf(), Leaf(numbers=(3,))), Leaf(), "b", {"x": [1]}),
    ],
)
def test_a_value_survives_json(value: Tree) -> None:
    assert decode(Tree, json.loads(json.dumps(asdict(value)))) == value


@pytest.mark.parametrize(
    "told", [None, [1], "x", {}, {"first": 1}, {"first": {"colour": "blue"}}, {"first": {}, "x": 1}]
)
def test_what_is_none_is_refused(told: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        decode(Tree, told)
