"""Classes of exactness."""

from __future__ import annotations

from lockstep.layout.classes import worst


def test_a_run_is_in_the_class_of_its_worst_part() -> None:
    assert worst([]) == "exact"
    assert worst(["exact", "close"]) == "close"
    assert worst(["approximate", "exact", "close"]) == "approximate"
