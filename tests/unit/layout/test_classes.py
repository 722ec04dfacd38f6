"""Classes of exactness."""

from __future__ import annotations

from lockstep.layout.classes import of_staleness, worst


def test_a_run_is_in_the_class_of_its_worst_part() -> None:
    assert worst([]) == "exact"
    assert worst(["exact", "close"]) == "close"
    assert worst(["approximate", "exact", "close"]) == "approximate"


def test_staleness() -> None:
    assert of_staleness(None, "cuda") == "exact"
    assert of_staleness(0, "cpu") == "exact"
    assert of_staleness(0, "cuda") == "close"
    assert of_staleness(1, "cpu") == "approximate"
