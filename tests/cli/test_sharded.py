"""`strategy=fsdp` from the command line: kills, whole weights afterwards, ranks that do not answer (A5)."""

from __future__ import annotations

import json
import re

import pytest
import torch

from tests.conftest import Lockstep

pytestmark = pytest.mark.forked

SCRIPT = """
import sys, time, torch, torch.nn.functional as F, lockstep
from torch import nn
from torch.utils.data import TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.extra = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        x = self.body(x)
        return self.head(x if FAULT == "skip" and x.sum() > 0 else self.extra(x))

with lockstep.Run("sharded") as run:
    model = run.model(Net(), wrap=[nn.Linear])
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    data = TensorDataset(torch.randn(30, 4), torch.arange(30) % 2)
    train = run.loader(data, batch_size=8, shuffle=True)
    test = run.loader(data, batch_size=12)
    if FAULT == "alone":
        if run.is_main_process:
            model.eval()(torch.ones(1, 4))
        run.barrier()
    for epoch in run.epochs(5):
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            if FAULT == "replica" and run.step == 2 and run.world.rank:
                break
            run.backward(loss)
            run.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if FAULT == "leave" and run.step == 2 and run.world.rank:
                break
            if FAULT == "slow":
                time.sleep(0.05)
            if FAULT == "state" and run.step == 3:
                torch.save(model.state_dict(), "model.pt")
        model.eval()
        with torch.no_grad():
            run.log(right=run.mean(model(x).argmax(1) == y for x, y in test))
        model.train()
        run.save()
"""


@pytest.fixture
def script(lockstep: Lockstep) -> Lockstep:
    lockstep.script(SCRIPT)
    return lockstep


def test_whole_and_sharded_with_a_kill(script: Lockstep) -> None:
    done = script(
        *("verify", "train.py", "--layouts", "2,kill@7", "--strategies", "ddp,fsdp", "--json"),
        *("--", "slow"),
        timeout=120,
    )
    assert done.code == 0, done.out + done.err
    verdict = json.loads(done.out)
    assert verdict["same"] is True
    assert len({layout["digest"] for layout in verdict["layouts"]}) == 1
    kills = [(one["strategy"], one["kills"]) for one in verdict["layouts"]]
    assert kills == [(name, 1) for name in ("ddp", "fsdp")]


def test_a_checkpoint_of_a_sharded_run_has_whole_weights(script: Lockstep) -> None:
    done = script("run", "-n", "2", "--strategy", "fsdp", "--run-dir", "run", "train.py")
    assert done.code == 0, done.err
    assert script("export", "run").code == 0
    weights = torch.load(script.directory / "run/model.pt", weights_only=True)
    assert {name: tuple(value.shape) for name, value in weights.items()} == {
        "body.0.weight": (8, 4),
        "body.0.bias": (8,),
        "body.1.weight": (8,),
        "body.1.bias": (8,),
        "body.1.running_mean": (8,),
        "body.1.running_var": (8,),
        "body.1.num_batches_tracked": (),
        "extra.weight": (8, 8),
        "extra.bias": (8,),
        "head.weight": (2, 8),
        "head.bias": (2,),
    }
    for rank in (0, 1):
        lines = (script.directory / f"run/events/rank-{rank}.jsonl").read_text().splitlines()
        (held,) = (event for event in map(json.loads, lines) if event["kind"] == "memory")
        assert (
            held["parameters"] == held["gradients"] == sum(p.numel() for p in shards(weights)) * 4
        )


def shards(weights: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """What each of two ranks holds of the parameters, all of which can be halved."""
    return [
        value[: len(value) // 2] for name, value in weights.items() if name[-4:] in ("ight", "bias")
    ]


@pytest.mark.wide(beyond=1)
@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        ("state", "ModelError", "state_dict() was called, and this rank holds a part of each"),
        ("skip", "ModelError", "expected the same units in the same order on all ranks"),
        ("alone", "MismatchError", "rank 0 is in the gathering of parameters"),
    ],
)
def test_one_error_and_no_hang(script: Lockstep, fault: str, kind: str, message: str) -> None:
    done = script("run", "-n", "2", "--strategy", "fsdp", "train.py", "--", fault, timeout=30)
    assert done.code == 1
    assert message in done.err
    assert kind in done.err
    assert "hint: " in done.err
    assert "Traceback" not in done.err


@pytest.mark.wide
def test_a_rank_that_leaves_is_named_and_not_tried_again(script: Lockstep) -> None:
    """The call in which rank 0 waits for rank 1 depends on which of them is faster."""
    done = script("run", "-n", "2", "--strategy", "fsdp", "train.py", "--", "leave", timeout=30)
    assert done.code == 1
    assert re.search(
        r"MismatchError: rank 0 is .*, rank 1 in batch 0 of loader 1 in epoch 0"
        r"|MismatchError: rank 1 is in the gathering of parameters at .*, rank 0 is in the comparison"
        r"|EarlyExitError: rank 1 left this loop in batch 2",
        done.err,
    ), done.err
    assert "native code" not in done.err


def test_a_rank_that_leaves_between_its_replicas_is_named(script: Lockstep) -> None:
    """The other one waits in a backward pass that is not its last in the batch."""
    options = ("--strategy", "fsdp", "--replicas", "4")
    done = script("run", "-n", "2", *options, "train.py", "--", "replica", timeout=30)
    assert done.code == 1
    early = "EarlyExitError: rank 1 left this loop in batch 2, rank 0 waits for it in batch 2"
    _, found, verdict = done.err.rpartition(early)
    assert found, done.err
    waits = SCRIPT.splitlines().index("            run.backward(loss)") + 1
    assert f"  at train.py:{waits} in <module>\n" in verdict
    assert "backward.py" not in done.err, "the script's lines, and none of Lockstep's or torch's"


MEASURED = """
import ctypes, json, os, time, torch, lockstep
from pathlib import Path
from torch import nn
from torch.utils.data import TensorDataset
from lockstep.state.checkpoint.shared_memory import Descriptors
from lockstep.state.checkpoint.snapshot import Snapshots
from lockstep.engine.recovery.checkpointing import StateSaver

taken, grown = [], []
write, at_point = Snapshots.write, StateSaver.at_point

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

def watched(keeper):
    count = len(taken)
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status("VmRSS")
    at_point(keeper)
    if len(taken) > count:
        grown.append(status("VmHWM") - before)

Snapshots.write = lambda *told: (taken.append(1), write(*told))
StateSaver.at_point = watched

with lockstep.Run("measured") as run:
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(4)]
    model = run.model(nn.Sequential(*layers))
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    for x, in run.loader(TensorDataset(torch.ones(200, 1024)), batch_size=4):
        run.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.05)
    rank = run.world.rank
memory = sum(os.fstat(one).st_size for one in Descriptors.find(os.environ).buffers)
Path(f"{rank}.json").write_text(json.dumps({"grown": grown, "memory": memory}))
"""


@pytest.mark.wide
def test_a_snapshot_takes_the_share_of_each_rank(lockstep: Lockstep) -> None:
    """A layer has 12 MiB with AdamW's averages; the launcher's memory holds two snapshots."""
    lockstep.script(MEASURED)
    done = lockstep("run", "-n", "2", "--strategy", "fsdp", "train.py", timeout=60)
    assert done.code == 0, done.err
    mebi = 1 << 20
    for rank in (0, 1):
        told = json.loads((lockstep.directory / f"{rank}.json").read_text())
        assert len(told["grown"]) >= 2, "there were snapshots"
        assert max(told["grown"]) <= (24 + 12) * mebi
        assert told["memory"] <= 2 * 48 * mebi + mebi
