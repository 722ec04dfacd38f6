"""Checksums of a state: what differs is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.engine.training.checksums import Checksums
from lockstep.state.checkpoint.state_codec import flatten


def test_what_differs_is_named() -> None:
    def state(weight: float, count: int) -> Checksums:
        models = {"0": {"weight": torch.full((4,), weight), "bias": torch.zeros(4)}}
        registered = {"seen": {"count": count}}
        _, tensors = flatten({"models": models, "registered": registered, "gradients": models})
        return Checksums.of(tensors, registered)

    assert state(1.0, 1).brief() == state(1.0, 1).brief()
    assert state(1.0, 1).differing(state(2.0, 1)) == ["models.0.weight"]
    assert state(1.0, 1).differing(state(1.0, 2)) == ["registered.seen.count"]


@pytest.mark.parametrize(
    ("one", "other", "named"),
    [
        ({"best": 0.5, "seen": [1]}, {"best": 0.5, "seen": [2]}, ["registered.state.seen"]),
        ({"best": torch.ones(2)}, {"best": torch.zeros(2)}, ["registered.state.best"]),
        ({"best": torch.ones(2, 3).T}, {"best": torch.ones(3, 2)}, ["registered.state.best"]),
        ({}, {"best": None}, ["registered.state", "registered.state.best"]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, ["registered.state"]),
        ({1: 2}, {"1": 2}, ["registered.state"]),
        (3, 4, ["registered.state"]),
        ({"best": {"a": torch.ones(1)}}, {"best": {"a": torch.ones(1)}}, []),
    ],
)
def test_values_of_registered_objects_are_named(one: Any, other: Any, named: list[str]) -> None:
    sums = []
    for state in (one, other):
        _, tensors = flatten({"registered": {"state": state}})
        sums.append(Checksums.of(tensors, {"state": state}))
    assert sums[0].differing(sums[1]) == named
    assert (sums[0].brief() == sums[1].brief()) == (not named)
