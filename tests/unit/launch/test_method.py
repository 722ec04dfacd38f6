"""Flags that say how a run trains."""

from __future__ import annotations

import pytest

from lockstep.errors import UsageError
from lockstep.launch.method import Method


def test_what_is_not_said_leaves_the_environment() -> None:
    assert set(Method().variables().values()) == {None}


def test_what_is_said_is_a_variable_of_every_rank() -> None:
    method = Method(strategy="fsdp", exchange="tree", precision="bf16", mesh="2x1", exact=False)
    assert method.variables() == {
        "LOCKSTEP_STRATEGY": "fsdp",
        "LOCKSTEP_EXCHANGE": "tree",
        "LOCKSTEP_PRECISION": "bf16",
        "LOCKSTEP_MESH": "2x1",
        "LOCKSTEP_EXACT": 0,
    }


@pytest.mark.parametrize(
    ("name", "value"), [("strategy", "zero"), ("exchange", "ring"), ("precision", "int8")]
)
def test_names_that_nothing_has(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"--{name} is '{value}'; expected one of "):
        Method(**{name: value})
