"""Generators go on in another process from where they stood in this one."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from lockstep.engine.data.randomness import Generators, set_generators, set_key


def draw_next() -> list[float]:
    return [torch.rand(()).item(), np.random.rand(), np.random.randn(), random.random()]


DRAWS = {
    "torch": lambda: torch.randn(7),
    "numpy": lambda: np.random.randn(3),  # an odd number leaves a spare one
    "python": lambda: random.gauss(0, 1),
}


@pytest.mark.parametrize(
    "names", [("torch",), ("numpy",), ("python",), ("torch", "numpy", "python")]
)
def test_they_go_on(names):
    set_key(3)
    begin = Generators.now()
    for name in names:
        DRAWS[name]()
    states = Generators.now().since(begin)
    assert states is not None
    assert sum(state is not None for state in states) == len(names)
    expected = [*draw_next(), random.gauss(0, 1), np.random.randn()]
    set_key(3)
    set_generators(states)
    assert [*draw_next(), random.gauss(0, 1), np.random.randn()] == expected


def test_nothing_is_told_where_nothing_was_drawn():
    set_key(4)
    assert Generators.now().since(Generators.now()) is None
