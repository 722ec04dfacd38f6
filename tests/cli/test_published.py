"""An exchange and a strategy of another package, found by their entry points."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import Done, Lockstep

pytestmark = pytest.mark.forked

#: What their package consists of: what there is, and how it works.
ENTRIES = """
from lockstep.registry import ExchangeEntry, StrategyEntry

all_gather = ExchangeEntry(build="gathering_sums:build")
told = StrategyEntry(hold="gathering_sums:hold")
"""
SUMS = """
import torch
import torch.distributed as dist
from lockstep.engine.strategies import ddp


class AllGather:
    name, exact, sent = "all-gather", True, None

    def __init__(self, group, forest):
        self.group, self.forest = group, forest

    def slots(self, bucket, extra=0):
        return [bucket.new_empty(bucket.numel() + extra) for _ in range(self.forest.own)]

    def start(self, slots, *, last, place=0):
        more = max(self.forest.counts) - len(slots)
        own = torch.stack([*slots, *[torch.zeros_like(slots[0])] * more])
        everyone = [torch.empty_like(own) for _ in self.forest.counts]
        dist.all_gather(everyone, own, group=self.group)
        nodes = [node for rank, n in enumerate(self.forest.counts) for node in everyone[rank][:n]]
        total = torch.futures.Future()
        total.set_result(self.forest.sum(nodes))
        return total

    def close(self):
        pass


def build(context):
    return AllGather(context.group, context.forest)


def hold(module, context, settings):
    context.say(f"theirs: {type(module).__name__} on {context.forest.size} rank(s)")
    return ddp.hold(module, context, settings)
"""
SCRIPT = """
import torch, lockstep
from torch.utils.data import TensorDataset

with lockstep.Run("published", replicas=4) as run:
    model = run.model(torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    for (x,) in run.loader(TensorDataset(torch.randn(64, 5)), batch_size=16, shuffle=True):
        run.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    run.print("used", run.exchange, run.exactness)
"""


@pytest.fixture
def site(tmp_path: Path) -> dict[str, str]:
    """Variables with which their package is installed."""
    place = tmp_path / "site"
    about = place / "gathering-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: gathering\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[lockstep.exchanges]\nall-gather = gathering:all_gather\n"
        "[lockstep.engine.strategies]\ntold = gathering:told\n"
    )
    (place / "gathering.py").write_text(ENTRIES)
    (place / "gathering_sums.py").write_text(SUMS)
    return {"PYTHONPATH": str(place)}


def digest(done: Done) -> str:
    assert done.code == 0, done.err
    found = re.search(r"digest=(\S+)", done.out)
    assert found is not None, done.out
    return found[1]


@pytest.mark.wide
@pytest.mark.ranks(3)
def test_they_train_like_those_of_lockstep(lockstep: Lockstep, site: dict[str, str]) -> None:
    lockstep.script(SCRIPT)
    expected = digest(lockstep("run", "--exchange", "tree", "-n", "2", "train.py"))
    for ranks in ("2", "3"):
        done = lockstep("run", "--exchange", "all-gather", "-n", ranks, "train.py", env=site)
        assert "used all-gather exact\n" in done.out
        assert digest(done) == expected
    both = ("--exchange", "all-gather", "--strategy", "told")
    done = lockstep("run", *both, "-n", "2", "train.py", env=site)
    assert "theirs: Sequential on 2 rank(s)\n" in done.err
    assert digest(done) == expected


def test_a_name_that_nothing_has_lists_theirs(lockstep: Lockstep, site: dict[str, str]) -> None:
    lockstep.script(SCRIPT)
    done = lockstep("run", "--exchange", "ring", "train.py", env=site)
    assert done.code == 2
    assert "--exchange is 'ring'; expected one of auto, shared-memory, tree" in done.err
    assert "diloco, all-gather\n" in done.err
    missing = lockstep("run", "--strategy", "told", "train.py")
    assert missing.code == 2
    assert "--strategy is 'told'; expected one of auto, single, ddp" in missing.err
