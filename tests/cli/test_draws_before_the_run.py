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

WITH_KIT = DRAW.replace("import json, os, random", "import json, os, random, kit")


def draws(lockstep, ranks: int = 2) -> list[list[float]]:
    """Return what each rank has drawn: from torch, NumPy and Python."""
    return [
        json.loads(text) for text in lockstep.wait_for(*(f"draws-{k}.json" for k in range(ranks)))
    ]


def test_generators_of_a_plain_script_differ_from_rank_to_rank(lockstep):
    lockstep.script("def shown():\n    import lockstep", "kit.py")
    done = lockstep("run", "-n", "2", lockstep.script(WITH_KIT))
    assert done.code == 0, done.err
    one, other = draws(lockstep)
    assert all(a != b for a, b in zip(one, other, strict=True)), (one, other)


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_generators_of_a_script_whose_module_uses_lockstep_are_equal(lockstep, start):
    script = lockstep.script(WITH_KIT)
    lockstep.script("import lockstep", "kit.py")
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


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_generators_of_functions(lockstep, start):
    done = lockstep.python(lockstep.script(FUNCTION), start)
    assert done.code == 0, done.err
    lines = [line for line in done.out.splitlines() if line.startswith("[")]
    assert lines == ["[False, False, False]", "[True, True, True]"]


TRAIN = """
import os, random, sys
import numpy, torch
from torch.utils.data import Dataset, Subset, SubsetRandomSampler, TensorDataset, random_split
import lockstep

torch.seed(), numpy.random.seed(), random.seed()  # as in a process of its own
x = torch.arange(64.0).reshape(32, 2)

class Files(Dataset):
    def __init__(self):
        self.names = [f"name-{k}" for k in range(32)]
        random.shuffle(self.names)
    def __len__(self):
        return len(self.names)
    def __getitem__(self, index):
        return {"x": torch.randn(2), "name": self.names[index], "array": numpy.ones(2)}

def data(kind):
    if kind == "split":
        return {"data": random_split(TensorDataset(x), [24, 8])[0]}
    if kind == "split-of-files":
        return {"data": Subset(list(x), numpy.random.permutation(32)[:20])}
    if kind == "files":
        return {"data": Files(), "num_workers": int(sys.argv[2])}
    if kind == "noise":
        return {"data": TensorDataset(torch.randn(32, 2))}
    if kind == "length":
        return {"data": list(range(16 + int(os.environ["RANK"])))}
    if kind == "sampler":
        return {"data": list(x), "sampler": SubsetRandomSampler(random.sample(range(32), 16))}

made = data(sys.argv[1])
with lockstep.Run("test", replicas=2) as run:
    loader = run.loader(batch_size=8, **made)
    for epoch in run.epochs(2):
        for batch in loader:
            pass
"""


@pytest.mark.wide(beyond=2)
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("split", "the indices of the Subset on rank 1 are not those on rank 0"),
        ("split-of-files", "the indices of the Subset on rank 1"),
        ("files 0", "Files): samples 0, 4, 7 on rank 1 are not those on rank 0"),
        ("files 2", "Files): samples 0, 4, 7 on rank 1 are not those on rank 0"),
        ("noise", "the values of the dataset on rank 1 are not those on rank 0"),
        ("length", "rank 0 has 16 samples, rank 1 has 17"),
        ("sampler", "the indices of the sampler on rank 1"),
    ],
)
@pytest.mark.ranks(2)
def test_other_data_on_another_rank_is_named_in_the_first_loop(lockstep, words, told):
    done = lockstep("run", "-n", "2", lockstep.script(TRAIN), *words.split())
    assert done.code == 1, done.err
    assert "DivergenceError: loader 0 (" in done.err
    assert told in done.err
    assert "hint: draw what makes the data (random_split, shuffle, permutation) inside" in done.err


SPLIT = """
import torch
from torch.utils.data import TensorDataset, random_split
import lockstep

chosen, _ = random_split(TensorDataset(torch.arange(32)), [16, 16])
with lockstep.Run("test", replicas=2, progress=False) as run:
    loader = run.loader(chosen, batch_size=8)
    print(run.sum(x * 1 for (x,) in loader), chosen.indices)
"""


@pytest.mark.ranks(2)
def test_what_is_drawn_before_the_run_is_the_same_on_all_ranks_and_layouts(lockstep):
    """Without a seed of the script's: the launcher gives one, to all ranks of all launches."""
    script = lockstep.script(SPLIT)
    lines = set()
    for ranks in ("1", "2"):
        done = lockstep("run", "-n", ranks, script)
        assert done.code == 0, done.err
        lines.add(done.out.splitlines()[0])
    assert len(lines) == 1, lines
