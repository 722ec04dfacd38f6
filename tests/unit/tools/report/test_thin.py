from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.tools.quantities import rounded
from lockstep.tools.report.charts import envelope, thin

values = st.one_of(st.none(), st.floats(-1e6, 1e6), st.just(math.nan))


@given(st.lists(values, max_size=300), st.integers(4, 100))
def test_a_thin_curve_keeps_its_ends_and_its_extremes(ys: list[float | None], most: int) -> None:
    points = [(float(x), y) for x, y in enumerate(ys)]
    kept = thin(points, most)
    assert len(kept) <= max(most, 0)
    assert [x for x, _ in kept] == sorted({x for x, _ in kept})
    assert set(map(repr, kept)) <= set(map(repr, points))
    if points:
        assert (kept[0], kept[-1]) == (points[0], points[-1])
    known = [y for y in ys if y is not None and not math.isnan(y)]
    shown = [y for _, y in kept if y is not None and not math.isnan(y)]
    if known:
        assert (min(shown), max(shown)) == (min(known), max(known))


def test_a_short_curve_stays() -> None:
    points = [(0.0, 1.0), (1.0, None), (2.0, 3.0)]
    assert thin(points, 4) == points


def test_a_spike_of_a_long_curve_stays() -> None:
    points = [(float(x), 0.0) for x in range(100_000)]
    points[51_234] = (51_234.0, 9.0)
    kept = thin(points, 2000)
    assert len(kept) <= 2000
    assert (51_234.0, 9.0) in kept


def test_the_envelope_of_many_lines() -> None:
    lines = [[(float(x), float(k)) for x in range(1000)] for k in range(21)]
    found = envelope([*lines, [(3.0, None), (4.0, math.nan)]])
    assert {name: {y for _, y in points} for name, points in found.items()} == {
        "highest": {20.0},
        "median": {10.0},
        "lowest": {0.0},
    }
    assert {len(points) for points in found.values()} == {300}


@pytest.mark.parametrize(
    ("value", "shown"), [(1 / 3, 0.333333), (math.nan, None), (math.inf, None), (None, None)]
)
def test_rounded(value: float | None, shown: float | None) -> None:
    assert rounded(value) == shown
