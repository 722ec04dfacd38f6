"""Generators of real GPUs follow keys, and are left as they were; elsewhere these tests are skipped."""

from __future__ import annotations

import pytest
import torch

from lockstep.engine.data.randomness import Stream, set_key, undisturbed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device"),
]


def draw() -> list[float]:
    """Draw one number on every GPU."""
    devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.rand((), device=device).item() for device in devices]


def test_a_key_is_that_of_every_gpu() -> None:
    draw()  # CUDA is in use from here on
    set_key(5)
    first = draw()
    assert len(set(first)) == 1
    set_key(5)
    assert draw() == first


def test_what_is_drawn_in_between_disturbs_no_gpu() -> None:
    draw()
    set_key(5)
    expected = draw() + draw()
    stream = Stream(6)
    set_key(5)
    found = draw()
    with undisturbed():
        set_key(6)
        other = draw()
    with stream.active():
        assert draw() == other
    assert found + draw() == expected
