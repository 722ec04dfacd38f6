"""Checksums of a state: what differs is named."""

from __future__ import annotations

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
    assert state(1.0, 1).differing(state(1.0, 2)) == ["numbers"]
