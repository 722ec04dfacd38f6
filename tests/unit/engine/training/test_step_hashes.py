"""Hashes of parameters for the step record: what changes them, and how often they are computed."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.recovery.state import State
from lockstep.engine.training import step_hashes
from lockstep.engine.training.loop import Loop
from lockstep.engine.training.step_hashes import StepHashes, hash64
from lockstep.state.record.steps import Value


def test_any_bit_any_order_and_any_name_change_a_hash() -> None:
    tensors = {"a": torch.randn(5000), "b": torch.randn(5000), "c": torch.randn(3)}
    whole = hash64(tensors)()
    assert len(whole) == 8
    assert hash64({name: tensor.clone() for name, tensor in tensors.items()})() == whole
    assert hash64({**tensors, "a": tensors["b"], "b": tensors["a"]})() != whole
    assert hash64({"x": tensors["a"], "b": tensors["b"], "c": tensors["c"]})() != whole
    for name, place in (("a", 0), ("b", 4999), ("c", 1)):
        flipped = {key: tensor.clone() for key, tensor in tensors.items()}
        flipped[name].view(torch.int32)[place] ^= 1 << 31
        assert hash64(flipped)() != whole
    order = tensors["a"].clone()
    order[:2] = order[:2].flip(0)
    assert hash64({**tensors, "a": order})() != whole


SMALL, LARGE = [torch.zeros(1000)] * 4, [torch.zeros(1).expand(25_000_000)]


def hashed(
    parameters: list[torch.Tensor],
    seconds: Callable[[int], float],
    monkeypatch: pytest.MonkeyPatch,
    *,
    hash_seconds: float = 0.0,
    split: bool = False,
) -> list[int]:
    """Return which of 400 steps are hashed, whose lengths are given."""
    found: list[int] = []
    now = 1000.0

    def add(step: int, kind: int, value: Value) -> None:
        nonlocal now
        now += hash_seconds
        found.append(step)

    model = SimpleNamespace(steps_locally=False, parameters=parameters, state=dict)
    state = cast("State", SimpleNamespace(models=[model], is_split=split))
    hashes = StepHashes(cast("Loop", None), state, None, add, is_main=True)
    monkeypatch.setattr(step_hashes, "time", SimpleNamespace(monotonic=lambda: now))
    for step in range(1, 401):
        now += seconds(step)
        hashes.step_ends(step, cast("Microbatch", None))
    return found


@pytest.mark.parametrize(
    ("parameters", "seconds", "interval"),
    [(SMALL, 0.1, 1), (SMALL, 0.01, 4), (SMALL, 0.001, 64), (LARGE, 0.1, 128), (LARGE, 1, 16)],
)
def test_large_models_and_models_with_short_steps_are_hashed_less_often(
    monkeypatch: pytest.MonkeyPatch, parameters: list[torch.Tensor], seconds: float, interval: int
) -> None:
    found = hashed(parameters, lambda step: seconds, monkeypatch)
    assert found[-3:] == [n * interval for n in range(400 // interval - 2, 400 // interval + 1)]


def test_the_interval_follows_steps_that_become_shorter_or_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = hashed(SMALL, lambda step: 0.001 if 5 <= step <= 100 else 0.1, monkeypatch)
    assert found[:7] == [1, 2, 3, 4, 5, 64, 128]
    assert found[7:] == list(range(129, 401))


def test_hashes_that_take_longer_than_expected_are_computed_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = hashed(SMALL, lambda step: 0.01, monkeypatch, hash_seconds=0.002)
    assert found[-3:] == [320, 352, 384]


def test_the_interval_of_a_model_that_is_cut_over_ranks_follows_from_its_size_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = hashed(SMALL, lambda step: 0.001, monkeypatch, split=True)
    assert found == [64, 128, 192, 256, 320, 384]
