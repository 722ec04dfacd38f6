"""An exchange, a strategy and an environment of another package, found by their entry points."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import Done, Lockstep

pytestmark = pytest.mark.forked

#: What their package consists of: what there is, and how it works.
ENTRIES = """
from lockstep import World
from lockstep.registry import EnvironmentEntry, ExchangeEntry, StrategyEntry

all_gather = ExchangeEntry(build="gathering_sums:build", keywords=("piece_bytes",))
told = StrategyEntry(wrap="gathering_sums:wrap", fallback="single")


def detect(environ):
    if "CLUSTER_TASK" not in environ:
        return None
    rank, size = int(environ["CLUSTER_TASK"]), int(environ["CLUSTER_TASKS"])
    return World(
        rank=rank, size=size, local_rank=rank, local_size=size, address="127.0.0.1",
        key=environ["CLUSTER_JOB"], reason="CLUSTER_TASK is set",
    )


cluster = EnvironmentEntry(detect=detect)
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
    if context.settings:
        print("theirs:", dict(context.settings))
    return AllGather(context.group, context.forest)


def wrap(module, context, settings):
    context.say(f"theirs: {type(module).__name__} on {context.forest.size} rank(s)")
    return ddp.wrap(module, context, settings)
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
        "[lockstep.strategies]\ntold = gathering:told\n"
        "[lockstep.environments]\ncluster = gathering:cluster\n"
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


@pytest.mark.ranks(2)
def test_their_exchange_takes_its_keywords(lockstep: Lockstep, site: dict[str, str]) -> None:
    net = "torch.nn.Linear(8, 2))"
    lockstep.script(
        SCRIPT.replace(f"{net})", f"{net}, piece_bytes=64, matrix_approximation_rank=2)")
    )
    done = lockstep("run", "--exchange", "all-gather", "-n", "2", "train.py", env=site)
    assert digest(done)
    assert "theirs: {'piece_bytes': 64}\n" in done.out
    refused = lockstep("run", "--exchange", "tree", "-n", "2", "train.py", env=site)
    assert "ModelError: DistributedDataParallel has no setting piece_bytes" in refused.err


def test_a_name_that_nothing_has_lists_theirs(lockstep: Lockstep, site: dict[str, str]) -> None:
    lockstep.script(SCRIPT)
    done = lockstep("run", "--exchange", "ring", "train.py", env=site)
    assert done.code == 2
    assert "--exchange is 'ring'; expected one of auto, shared-memory, tree" in done.err
    assert "powersgd, all-gather\n" in done.err
    missing = lockstep("run", "--strategy", "told", "train.py")
    assert missing.code == 2
    assert "--strategy is 'told'; expected one of auto, single, ddp" in missing.err


#: How the tasks of their launcher say who they are; a Slurm job and MPI's variables are around them.
TASKS = [
    {"CLUSTER_TASK": task, "CLUSTER_TASKS": "2", "PMI_RANK": "0", "PMI_SIZE": "1"} for task in "01"
]


@pytest.mark.parametrize("words", [("train.py",), ("run", "train.py")], ids=["ranks", "launchers"])
def test_their_launcher_gives_ranks(
    words: tuple[str, ...], lockstep: Lockstep, site: dict[str, str], tmp_path: Path
) -> None:
    lockstep.script(SCRIPT)
    expected = digest(lockstep("run", "-n", "2", "train.py"))
    job = {**site, "CLUSTER_JOB": str(tmp_path), "LOCKSTEP_RUN_DIR": "job"}
    program = ("-m", "lockstep") if words[0] == "run" else ()
    tasks = [lockstep.start(*words, env={**job, **task}, program=program) for task in TASKS]
    first, second = map(lockstep.finish, tasks)
    assert digest(first) == expected
    assert second.code == 0, second


def test_their_launcher_by_name(lockstep: Lockstep, site: dict[str, str]) -> None:
    lockstep.script("import lockstep\nprint(lockstep.detect().environment)\n")
    chosen = {"LOCKSTEP_ENVIRONMENT": "cluster"}
    task = {**TASKS[1], "CLUSTER_JOB": "1"}
    assert lockstep.python("train.py", env={**site, **chosen, **task}).out == "cluster\n"
    missing = lockstep.python("train.py", env=chosen)
    message = "LOCKSTEP_ENVIRONMENT is 'cluster'; expected one of ray, lockstep, kubeflow, torchrun"
    assert message in missing.err
