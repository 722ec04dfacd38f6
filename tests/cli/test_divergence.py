"""Ranks that hold other bits are named before a restart would give all of them those of one."""

from __future__ import annotations

import re

import pytest

pytestmark = [pytest.mark.forked, pytest.mark.ranks(2)]

SCRIPT = """
import os
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
import lockstep

X = torch.randn(96, 8, generator=torch.Generator().manual_seed(0))
with lockstep.Run("t", replicas=4, progress=False) as run:
    train = run.loader(TensorDataset(X, X[:, :4].argmax(1)), batch_size=16, shuffle=True)
    model = run.model(nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4)))
    optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    BEFORE
    for epoch in run.epochs(3):
        for x, y in train:
            optimizer.zero_grad()
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            AFTER
"""
#: Weights that follow from the first microbatch, as those of ActNorm do: each rank has another one.
INITIALIZES = "model[1].weight.data /= model(next(iter(train))[0]).std()"
CHANGES = """if run.step == 6 and run.world.rank == 1: model[0].bias.data += 1"""
REFUSED = "DivergenceError: after step {} rank 1 and rank 0 hold other bits of {}"


def refused(lockstep, before: str, after: str, kill: int) -> str:
    script = lockstep.script(SCRIPT.replace("BEFORE", before).replace("AFTER", after))
    # Without the audit, which comes to some of these first.
    faults = {"LOCKSTEP_FAULTS": f"kill@{kill}", "LOCKSTEP_AUDIT": "off"}
    done = lockstep("run", "-n", "2", "--run-dir", "r", script, env=faults, timeout=60)
    assert done.code == 1, done.out + done.err
    assert "finished" not in done.out + done.err
    return done.err


def test_a_seed_of_each_rank_is_refused_before_the_first_step(lockstep):
    script = lockstep.script(SCRIPT.replace("Run(", "Run(seed=__import__('os').getpid(), name="))
    done = lockstep("run", "-n", "2", script, env={"LOCKSTEP_AUDIT": "off"})
    assert done.code == 1
    assert re.search(r"MismatchError: seed is \d+ on rank 1 and \d+ on rank 0; expected", done.err)
    assert "hint: give the run a constant" in done.err


def test_ranks_that_begin_with_other_weights(lockstep):
    told = refused(lockstep, INITIALIZES, "", kill=9)
    assert REFUSED.format(1, "1.weight (Sequential)") in told


def test_a_rank_that_changes_its_weights_later(lockstep):
    told = refused(lockstep, "", CHANGES, kill=9)
    assert "and rank 0 hold other bits of 0.bias (Sequential)" in told


def test_a_checkpoint_of_ranks_that_differ_does_not_count(lockstep):
    told = refused(lockstep, "", f"{CHANGES}\n            if run.step == 8: run.save()", kill=99)
    assert "and rank 0 hold other bits of 0.bias (Sequential)" in told
    assert not list((lockstep.directory / "r").glob("checkpoints/step-*")), "nothing to resume from"


def test_a_variable_of_the_script_is_named_when_the_state_is_saved(lockstep):
    counts = (
        "if run.step == 6: state.best += run.world.rank\n            if run.step == 8: run.save()"
    )
    told = refused(lockstep, "state = run.state(best=0, seen=2)", counts, kill=99)
    assert "and rank 0 hold other bits of state.best; expected" in told


def test_a_variable_of_the_script_is_named_at_the_end(lockstep):
    before = SCRIPT.replace("BEFORE", "state = run.state(best=0, seen=2)").replace("AFTER", "")
    script = lockstep.script(f"{before}    state.best += run.world.rank")
    done = lockstep("run", "-n", "2", script, timeout=60)
    assert done.code == 1
    assert ": state.best differ; expected the same bits" in done.err
