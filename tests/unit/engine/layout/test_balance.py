"""Cutting a row of weights into pieces."""

from __future__ import annotations

import itertools

import pytest

from lockstep.engine.layout.balance import balance
from lockstep.errors import UsageError


@pytest.mark.parametrize(
    "weights", [[1, 1, 1, 1], [5, 0, 0, 5, 1], [0, 0, 7], [3, 1, 4, 1, 5, 9, 2]]
)
def test_the_heaviest_piece_is_as_light_as_any_cut_makes_it(weights):
    for parts in range(1, len(weights) + 1):
        pieces = balance(weights, parts)
        assert [place for piece in pieces for place in piece] == list(range(len(weights)))
        assert len(pieces) == parts
        assert all(len(piece) for piece in pieces)
        heaviest = max(sum(weights[place] for place in piece) for piece in pieces)
        assert heaviest == min(
            max(sum(weights[a:b]) for a, b in itertools.pairwise([0, *cuts, len(weights)]))
            for cuts in itertools.combinations(range(1, len(weights)), parts - 1)
        )


@pytest.mark.parametrize("parts", [0, 3])
def test_more_pieces_than_things_are_refused(parts):
    with pytest.raises(UsageError, match=f"2 things for {parts} pieces"):
        balance([1, 2], parts)
