"""The charts of a benchmark: what their error bars span."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.tools.bench import charts


@pytest.mark.parametrize(
    "measured",
    [
        {"samples_per_second": 200.0, "samples_per_second_range": [100.0, 250.0]},
        {"wall_seconds": 10.0, "wall_seconds_range": [8.0, 20.0]},
    ],
    ids=["samples per second", "wall seconds"],
)
def test_an_error_bar_spans_the_speedups_of_all_launches(measured: dict[str, Any]) -> None:
    """The fastest launch is at its upper end: the most samples per second, or the fewest seconds."""
    row = {"ranks": 2, "method": "ddp", "exchange": "tree", "speedup": 4.0, **measured}
    below, above = charts._ends(row)
    assert (4.0 - below, 4.0 + above) == (2.0, 5.0)
