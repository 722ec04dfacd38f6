import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.engine.layout.replicas import block, share
from lockstep.errors import UsageError


@given(st.integers(0, 10**6), st.integers(1, 500))
def test_shares_are_disjoint_complete_and_balanced(total: int, parts: int) -> None:
    shares = [share(total, parts, part) for part in range(parts)]
    assert shares[0].start == 0
    assert shares[-1].stop == total
    assert all(a.stop == b.start for a, b in itertools.pairwise(shares))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_blocks_where_ranks_do_not_divide_replicas() -> None:
    assert [list(block(4, 3, rank)) for rank in range(3)] == [[0, 1], [2], [3]]


def test_more_ranks_than_replicas_is_refused() -> None:
    with pytest.raises(UsageError, match="3 ranks for 2 replicas"):
        block(2, 3, 0)
