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

SEEDED = DRAW.replace("import json, os, random", "import json, os, random, lockstep")


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


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_generators_of_a_script_that_uses_lockstep_are_equal(lockstep, start):
    script = lockstep.script(SEEDED)
    found = []
    for ranks, seed in ((2, "0"), (1, "0"), (1, "1")):
        env = {"LOCKSTEP_SEED": seed}
        done = lockstep("run", "-n", str(ranks), "--start", start, script, env=env)
        assert done.code == 0, done.err
        found += draws(lockstep, ranks)
    one, other, alone, reseeded = found
    assert one == other == alone, "on all ranks, and in every launch"
    assert all(a != b for a, b in zip(alone, reseeded, strict=True)), "by the run's seed"


FUNCTION = """
import random, sys, numpy, torch
import lockstep

def draw():
    return torch.rand(()).item(), numpy.random.rand(), random.random()

def plain():
    return draw()

def opens():
    with lockstep.Run("test", progress=False):
        return None

def trains():
    found = draw()
    opens()
    return found

if __name__ == "__main__":
    for main in (plain, trains):
        one, other = lockstep.launch(main, n=2, start=sys.argv[1])
        print([a == b for a, b in zip(one, other)])
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_generators_of_functions(lockstep, start):
    done = lockstep.python(lockstep.script(FUNCTION), start)
    assert done.code == 0, done.err
    lines = [line for line in done.out.splitlines() if line.startswith("[")]
    assert lines == ["[False, False, False]", "[True, True, True]"]
