"""`lockstep verify`: same, not same, and what it refuses."""

from __future__ import annotations

import json
import re

import pytest

from tests.conftest import Lockstep

SCRIPT = """
import os, sys, torch, torch.nn.functional as F, lockstep
from torch import nn
from torch.utils.data import TensorDataset

FAULT = sys.argv[1] if len(sys.argv) > 1 else ""
with lockstep.Run("verified", seed=os.getppid() if FAULT == "seed" else 0) as run:
    model = run.model(nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(30, 4), torch.arange(30) % 2)
    sampler = [0] + list(range(29)) if FAULT == "twice" else None
    train = run.loader(data, batch_size=8, shuffle=sampler is None, sampler=sampler)
    own = torch.Generator().manual_seed(run.world.rank)
    for epoch in run.epochs(2):
        for x, y in train:
            if FAULT == "noise" and run.step >= 5:
                x = x + torch.randn(x.shape, generator=own)
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if FAULT == "weights" and run.step == 3 and run.world.rank == 1:
                with torch.no_grad():
                    model[0].weight[0, 0] += 1
            if FAULT == "crash":
                raise ZeroDivisionError("no luck")
        hits = 0
        for x, y in train if FAULT == "hits" else ():
            hits += int((model(x).argmax(1) == y).sum())
        if hits > 25:
            run.save(best=hits)
"""


@pytest.fixture
def verify(lockstep: Lockstep) -> Lockstep:
    lockstep.script(SCRIPT)
    return lockstep


def test_the_same_on_all_layouts(verify: Lockstep) -> None:
    done = verify("verify", "train.py", "--layouts", "1,2", "--json")
    verdict = json.loads(done.out)
    assert done.code == 0
    assert verdict["same"] is True
    assert verdict["difference"] is None
    assert verdict["samples"] == {"loops": 2, "twice": 0, "never": 0}
    assert [layout["layout"] for layout in verdict["layouts"]] == ["1", "2"]
    assert {layout["steps"] for layout in verdict["layouts"]} == {8}
    assert [(one["kills"], one["generations"]) for one in verdict["layouts"]] == [(0, 1), (0, 1)]
    assert len({layout["digest"] for layout in verdict["layouts"]}) == 1


@pytest.mark.forked
def test_randomness_of_a_rank_is_found_and_named(verify: Lockstep) -> None:
    # Without the audit, which refuses the script on the first layout.
    without = {"LOCKSTEP_AUDIT": "off"}
    done = verify("verify", "--layouts", "1,2", "train.py", "--", "noise", env=without)
    assert done.code == 3
    assert "same: no" in done.out
    assert "first difference: step 6 (epoch 1, batch 1), replica 1: the loss is" in done.out


@pytest.mark.wide
@pytest.mark.forked
def test_ranks_that_change_weights_by_themselves_are_found(verify: Lockstep) -> None:
    done = verify("verify", "train.py", "--layouts", "1,2", "--", "weights")
    assert done.code == 3
    assert "first difference: step 3" in done.out
    assert "the ranks of 2 ranks hold different parameters" in done.out


@pytest.mark.forked
def test_warnings_of_the_runs_are_listed_once(verify: Lockstep) -> None:
    done = verify("verify", "train.py", "--layouts", "1,2", "--", "hits")
    assert "same: yes" in done.out
    assert done.out.count("warning: `hits` (train.py:") == 1, done.out
    told = json.loads(verify("verify", "--json", "--layouts", "1,2", "train.py", "hits").out)
    assert [text.split()[0] for text in told["warnings"]] == ["`hits`"]


@pytest.mark.forked
def test_a_seed_of_each_launch_is_the_first_difference(verify: Lockstep) -> None:
    done = verify("verify", "train.py", "--layouts", "1,2", "--", "seed")
    assert done.code == 3
    assert re.search(
        r"first difference: the seed of the run is \d+ on 1 rank, \d+ on 2 r", done.out
    )


@pytest.mark.forked
def test_a_script_that_fails_is_no_verdict(verify: Lockstep) -> None:
    done = verify("verify", "train.py", "--layouts", "1,2", "--", "crash")
    assert done.code == 1
    assert "the script fails on 1 rank" in done.err
    assert "ZeroDivisionError: no luck" in done.err
    assert "Traceback" not in done.err


TWO_RUNS = """
import sys, torch, lockstep
for fold in range(2):
    with lockstep.Run(f"fold-{fold}", replicas=2) as run:
        model = run.model(torch.nn.Linear(4, 2))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        own = torch.Generator().manual_seed(run.world.rank)
        for (x,) in run.loader(torch.utils.data.TensorDataset(torch.randn(20, 4)), batch_size=4):
            if sys.argv[1:] and fold == 1 and run.step == 2:
                x = x + torch.randn(x.shape, generator=own)
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
"""


@pytest.mark.forked
def test_each_run_of_a_script_is_compared(lockstep: Lockstep) -> None:
    lockstep.script(TWO_RUNS)
    done = lockstep("verify", "train.py", "--layouts", "1", "2,kill@3", timeout=120)
    assert done.code == 0, done.out + done.err
    assert "same: yes\nsamples: 2 loops checked, 0 seen twice, 0 never\n" in done.out
    without = {"LOCKSTEP_AUDIT": "off"}
    done = lockstep("verify", "train.py", "--layouts", "1,2", "--", "noise", env=without)
    assert done.code == 3
    assert "first difference: run 2 in the script: step 3 (epoch 0, batch 2)" in done.out


@pytest.mark.forked
def test_a_script_without_a_run(lockstep: Lockstep) -> None:
    lockstep.script("print('nothing to verify')")
    done = lockstep("verify", "train.py", "--layouts", "1,2")
    assert done.code == 2
    assert "the script ends without a lockstep.Run" in done.err


@pytest.mark.parametrize(
    ("layouts", "message"),
    [
        ("2", "names one layout"),
        ("1,0", "'0' is no number of ranks"),
        ("1,x", "'x' is no number"),
        ("kill@3,2", "kill@3 comes before any layout"),
        ("1 2>4@9>2@3", "the steps of the layout '2>4@9>2@3' do not rise"),
        ("1,2 --kills 0", "--kills is 0; expected at least 1"),
        ("1,2 --seed 1", "--seed without --kills"),
    ],
)
@pytest.mark.forked
def test_layouts_that_are_none(verify: Lockstep, layouts: str, message: str) -> None:
    done = verify("verify", "train.py", "--layouts", *layouts.split())
    assert done.code == 2
    assert message in done.err


@pytest.mark.wide
@pytest.mark.ranks(2)
@pytest.mark.forked
def test_the_same_with_a_change_of_ranks_a_kill_and_a_storm(verify: Lockstep) -> None:
    words = ("--layouts", "1", "2>1@3,kill@6", "--kills", "6", "--seed", "1")
    done = verify("verify", *words, "train.py", timeout=120)
    assert done.code == 0, done.out + done.err
    assert "same: yes\nsamples: 2 loops checked, 0 seen twice, 0 never\n" in done.out
    assert re.search(r"^│ 2>1@3,kill@6 │ 8 +│ 1 +│", done.out, re.MULTILINE)
    assert re.search(r"^│ 2,kills=6 +│ 8 +│ 6 +│", done.out, re.MULTILINE)
    assert "ran on layout 2>1@3,kill@6: 8 steps, 1 kill, 3 generations, " in done.err
    assert re.search(r"^ran on layout 2,kills=6: 8 steps, 6 kills, \d gen", done.err, re.MULTILINE)


@pytest.mark.wide
@pytest.mark.forked
def test_a_fault_that_the_run_does_not_live_to_see(verify: Lockstep) -> None:
    done = verify("verify", "train.py", "--layouts", "1,term@99", "1")
    assert done.code == 2
    assert done.err.startswith(
        "lockstep: error: layout 1,term@99: the run was over before term@99 could happen; "
        "it has 8 steps\nhint: "
    )


@pytest.mark.forked
def test_a_missing_script(lockstep: Lockstep) -> None:
    done = lockstep("verify", "nowhere.py", "--layouts", "1,2")
    assert done.code == 2
    assert "the script nowhere.py does not exist" in done.err


@pytest.mark.wide
@pytest.mark.forked
def test_traces_are_kept_on_request(verify: Lockstep) -> None:
    done = verify("verify", "train.py", "--layouts", "1,2", "--keep-runs", "kept")
    assert done.code == 0
    assert (verify.directory / "kept/1-2/trace/rank-1.0.jsonl").exists()
    again = verify("verify", "train.py", "--layouts", "1,2", "--keep-runs", "kept")
    assert again.code == 2
    assert "hint:" in again.err


OBJECTS = """
import sys, torch, torch.nn.functional as F, lockstep
from torch import nn
from torch.utils.data import TensorDataset

FAULT = sys.argv[1]

class Average:
    def __init__(self):
        self.value = torch.zeros(())
    def state_dict(self):
        return {"value": self.value}
    def load_state_dict(self, state):
        self.value = state["value"]

with lockstep.Run("objects") as run:
    model = run.model(nn.Linear(4, 2))
    ema = run.register("ema", Average())
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(30, 4), torch.arange(30) % 2)
    train, test = run.loader(data, batch_size=8, shuffle=True), run.loader(data, batch_size=10)
    for epoch in run.epochs(2):
        for x, y in train:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            if FAULT == "ema":
                ema.value = ema.value + run.world.size**2
        with torch.no_grad():
            run.mean(F.cross_entropy(model(x), y) for x, y in test)
"""
#: A loader with a fault: in every evaluation, rank 1 of two sees the first sample of its share twice.
TWICE = """
import torch
from lockstep.engine.training.loop import Loop
begins = Loop.microbatch_begins
def begin(self, microbatch, data):
    if not torch.is_grad_enabled() and not microbatch.first:
        microbatch.indices[1] = microbatch.indices[0]
    begins(self, microbatch, data)
Loop.microbatch_begins = begin
"""


@pytest.mark.forked
def test_the_registered_object_that_differs_is_named(lockstep: Lockstep) -> None:
    lockstep.script(OBJECTS)
    done = lockstep("verify", "train.py", "--layouts", "1,2", "--", "ema")
    assert done.code == 3
    expected = "step 1: equal samples and losses, but the state of ema is sha256:"
    assert f"first difference: {expected}" in done.out
    assert "samples: 4 loops checked, 0 seen twice, 0 never" in done.out


@pytest.mark.forked
def test_samples_that_an_evaluation_sees_twice_or_never_are_found(lockstep: Lockstep) -> None:
    lockstep.script(TWICE + OBJECTS)
    done = lockstep("verify", "train.py", "--layouts", "1,1", "--replicas", "2", "--", "twice")
    assert done.code == 3
    assert "same: yes\nsamples: 4 loops checked, 6 seen twice, 6 never" in done.out
    assert "  twice: sample 5 of loader 1 in epoch 0\n" in done.out
    assert "  never: sample 6 of loader 1 in epoch 0\n" in done.out


@pytest.mark.forked
def test_a_run_is_preempted_between_the_updates_of_a_batch(lockstep: Lockstep) -> None:
    lockstep.script("""
import torch, lockstep
from torch import nn

with lockstep.Run("two") as run:
    one, two = run.model(nn.Linear(4, 1)), run.model(nn.Linear(4, 1))
    steps = [run.optimizer(torch.optim.SGD(m.parameters(), lr=0.1)) for m in (one, two)]
    for epoch in run.epochs(2):
        for batch in run.batches(run.loader(torch.randn(24, 4), batch_size=4)):
            for model, optimizer in zip((one, two), steps):
                for x in batch:
                    optimizer.zero_grad()
                    run.backward(model(x).square().mean())
                    optimizer.step()
""")
    done = lockstep("verify", "train.py", "--layouts", "1", "2,term@7")
    assert done.code == 0, done.out + done.err
    assert "ran on layout 2,term@7: 24 steps, 0 kills, 2 generations" in done.err
