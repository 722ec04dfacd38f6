"""Flags that say how a run trains."""

from __future__ import annotations

import pytest

from lockstep.errors import UsageError
from lockstep.launch.method import Method


def test_what_is_not_said_leaves_the_environment() -> None:
    assert set(Method().variables().values()) == {None}


def test_what_is_said_is_a_variable_of_every_rank() -> None:
    method = Method(strategy="fsdp", exchange="tree", precision="bf16", mesh="2x1", exact=False)
    said = {name: value for name, value in method.variables().items() if value is not None}
    assert said == {
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


def test_steps_between_meetings() -> None:
    assert Method(sync_every=8).variables()["LOCKSTEP_SYNC_EVERY"] == 8
    with pytest.raises(UsageError, match="--sync-every is 0; expected at least 1"):
        Method(sync_every=0)
