"""Classes of exactness."""

from __future__ import annotations

from lockstep.engine.layout.classes import of_servers, worst


def test_a_run_is_in_the_class_of_its_worst_part() -> None:
    assert worst([]) == "exact"
    assert worst(["exact", "close"]) == "close"
    assert worst(["approximate", "exact", "close"]) == "approximate"


def test_servers_that_update_do_so_on_the_cpu() -> None:
    assert of_servers("ps", None, "cuda") == "exact"
    assert of_servers("ps", 4, "cpu") == "exact"
    assert of_servers("ps", 0, "cuda") == "close"
    assert of_servers("ddp", 4, "cuda") == "exact"
