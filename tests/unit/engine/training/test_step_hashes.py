"""Hashes of parameters for the step record: what changes them, and how often they are computed."""

from __future__ import annotations

import torch

from lockstep.engine.training.step_hashes import hash64, interval


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


def test_large_models_are_hashed_less_often() -> None:
    assert interval([torch.zeros(1000)] * 10) == 1
    assert interval([torch.zeros(1, dtype=torch.float32).expand(25_000_000)]) == 128
