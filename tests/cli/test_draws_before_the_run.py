"""What scripts draw: equal on all ranks before a run (A4), different in a plain script (A3)."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.forked

DRAW = """
import json, os, random
import numpy, torch

with open(f"draws-{os.environ['RANK']}.json", "w") as file:
    json.dump([torch.rand(()).item(), numpy.random.rand(), random.random()], file)
"""


def draws(lockstep, ranks: int = 2) -> list[list[float]]:
    """Return what each rank has drawn: from torch, NumPy and Python."""
    return [
        json.loads(text) for text in lockstep.wait_for(*(f"draws-{k}.json" for k in range(ranks)))
    ]


def test_generators_of_a_plain_script_differ_from_rank_to_rank(lockstep):
    done = lockstep("run", "-n", "2", lockstep.script(DRAW))
    assert done.code == 0, done.err
    one, other = draws(lockstep)
    assert all(a != b for a, b in zip(one, other, strict=True)), (one, other)
