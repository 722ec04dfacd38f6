import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.layout.replicas import block
from lockstep.engine.layout.tree import fold, leaves, merges, nodes, split, total


def recursive_sum(values: list[np.float32], lo: int, hi: int) -> np.float32:
    """The definition itself, against which the stack machine is held."""
    if hi - lo == 1:
        return values[lo]
    middle = split(lo, hi)
    return recursive_sum(values, lo, middle) + recursive_sum(values, middle, hi)


def layout_sum(values: list[np.float32], ranks: int) -> np.float32:
    replicas = len(values)
    partial: list[np.float32] = []
    intervals: list[tuple[int, int]] = []
    for rank in range(ranks):
        own = block(replicas, ranks, rank)
        counts, remaining = merges(leaves(own), replicas)
        partial += fold([values[r] for r in own], counts, lambda a, b: a + b)
        intervals += remaining
    counts, root = merges(intervals, replicas)
    assert root == [(0, replicas)]
    return fold(partial, counts, lambda a, b: a + b)[0]


@given(st.integers(1, 70), st.integers(0, 2**31))
def test_every_layout_sums_to_the_same_bits(replicas: int, seed: int) -> None:
    values = list(np.random.default_rng(seed).standard_normal(replicas).astype(np.float32))
    expected = recursive_sum(values, 0, replicas).tobytes()
    assert total(values, lambda a, b: a + b).tobytes() == expected
    for ranks in range(1, replicas + 1):
        assert layout_sum(values, ranks).tobytes() == expected


def test_a_plain_left_to_right_sum_has_other_bits() -> None:
    values = list(np.random.default_rng(0).standard_normal(64).astype(np.float32))
    assert np.float32(sum(values)).tobytes() != recursive_sum(values, 0, 64).tobytes()


@given(st.integers(1, 300), st.data())
def test_a_block_keeps_few_nodes(replicas: int, data: st.DataObject) -> None:
    lo = data.draw(st.integers(0, replicas - 1))
    hi = data.draw(st.integers(lo + 1, replicas))
    kept = nodes(range(lo, hi), replicas)
    assert (kept[0][0], kept[-1][1]) == (lo, hi)
    assert len(kept) <= 2 * max(1, replicas.bit_length())


@pytest.mark.parametrize(
    ("replicas", "ranks", "expected"),
    [
        (4, 2, [[(0, 2)], [(2, 4)]]),
        (4, 3, [[(0, 2)], [(2, 3)], [(3, 4)]]),
        (6, 2, [[(0, 2), (2, 3)], [(3, 4), (4, 6)]]),
        (6, 4, [[(0, 2)], [(2, 4)], [(4, 5)], [(5, 6)]]),
    ],
)
def test_maximal_nodes(replicas: int, ranks: int, expected: list[list[tuple[int, int]]]) -> None:
    assert [nodes(block(replicas, ranks, rank), replicas) for rank in range(ranks)] == expected
