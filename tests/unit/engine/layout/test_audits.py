"""Which steps are audited, and which rank differs."""

from __future__ import annotations

import pytest

from lockstep.engine.layout.audits import Values, compare, is_due, partner


def test_powers_of_two_first_then_every_so_many_steps() -> None:
    assert [step for step in range(1, 40) if is_due(step, 12)] == [1, 2, 4, 8, 12, 24, 36]
    assert [step for step in range(1, 40) if is_due(step, 16)] == [1, 2, 4, 8, 16, 32]
    assert [step for step in range(1, 4) if is_due(step, 1)] == [1, 2, 3]


def passes(
    size: int, wrong: set[int], *, carried: bool = False
) -> tuple[list[Values], list[Values]]:
    """Return what ranks compute of their own microbatch and of their partner's; `wrong` ranks differ."""
    hosted = [(rank, rank in wrong, carried) for rank in range(size)]
    audited = [(partner(rank, size), rank in wrong, False) for rank in range(size)]
    return hosted, audited


@pytest.mark.parametrize("size", [2, 3, 4, 7])
def test_ranks_that_compute_the_same_agree(size: int) -> None:
    assert compare(*passes(size, set())) is None


@pytest.mark.parametrize("size", [3, 4, 7])
def test_the_rank_that_computes_wrongly_is_named(size: int) -> None:
    for rank in range(size):
        found = compare(*passes(size, {rank}))
        assert found is not None
        assert found.odd == rank
        assert rank in (found.host, found.auditor)


def test_of_two_ranks_none_can_be_named() -> None:
    found = compare(*passes(2, {1}))
    assert found is not None
    assert found.odd is None


@pytest.mark.parametrize("size", [2, 3, 5])
def test_state_that_is_carried_over_is_no_ranks_fault(size: int) -> None:
    found = compare(*passes(size, set(), carried=True))
    assert found is not None
    assert found.odd is None
    assert found.host == partner(found.auditor, size)


def test_two_ranks_that_compute_wrongly_are_not_one() -> None:
    found = compare(*passes(7, {1, 5}))
    assert found is not None
    assert found.odd is None
