from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.layout.permutation import ArrayOrder, SequentialOrder, ShuffledOrder


@given(st.integers(0, 3000), st.integers(0, 2**62))
def test_is_a_bijection(length: int, key: int) -> None:
    assert sorted(ShuffledOrder(length, key)(0, length)) == list(range(length))


@given(st.integers(1, 10**12), st.integers(0, 2**62), st.data())
def test_huge_lengths_stay_inside_and_apart(length: int, key: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, length - 1))
    stop = min(length, start + 200)
    indices = ShuffledOrder(length, key)(start, stop)
    assert len(np.unique(indices)) == stop - start
    assert 0 <= indices.min() <= indices.max() < length


@given(st.integers(2, 5000), st.integers(0, 2**62), st.data())
def test_any_part_equals_the_whole(length: int, key: int, data: st.DataObject) -> None:
    order = ShuffledOrder(length, key)
    start = data.draw(st.integers(0, length))
    stop = data.draw(st.integers(start, length))
    np.testing.assert_array_equal(order(start, stop), order(0, length)[start:stop])


def test_all_orders_of_five_are_about_equally_frequent() -> None:
    trials = 6_000
    seen = Counter(tuple(ShuffledOrder(5, key)(0, 5).tolist()) for key in range(trials))
    expected = trials / 120
    chi_square = sum((seen[p] - expected) ** 2 / expected for p in permutations(range(5)))
    assert chi_square < 190  # 119 degrees of freedom: a value above 190 has probability 4e-5


def test_neighbours_are_torn_apart() -> None:
    order = ShuffledOrder(100_000, 7)(0, 100_000)
    adjacent = np.mean(np.abs(np.diff(order)) == 1)
    assert adjacent < 2e-4  # a random order has 2e-5 of them, the sequential order all


def test_other_keys_give_other_orders() -> None:
    first, second = ShuffledOrder(1000, 1)(0, 1000), ShuffledOrder(1000, 2)(0, 1000)
    assert np.mean(first == second) < 0.01


def test_sequential_and_listed() -> None:
    assert SequentialOrder(5)(1, 3).tolist() == [1, 2]
    assert ArrayOrder(np.array([4, 2, 2]))(1, 3).tolist() == [2, 2]


def test_a_length_beyond_the_words_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 0 to"):
        ShuffledOrder(2**63, 0)
