"""`strategy=fsdp` over several launchers: each has parts of the state in its memory."""

from __future__ import annotations

import json
import re

import pytest

from tests.conftest import Lockstep

pytestmark = [pytest.mark.forked, pytest.mark.ranks(4)]

SCRIPT = """
import os, signal, sys, time, torch, lockstep
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
with lockstep.Run("apart", replicas=4, threads=1) as run:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
    model = run.model(net, wrap=[nn.Linear])
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    data = TensorDataset(torch.randn(400, 4), torch.arange(400) % 3)
    for x, y in run.loader(data, batch_size=8, shuffle=True):
        if "die" in sys.argv and run.step == 42 and generation == 0 and run.world.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        run.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(0.1 if "die" in sys.argv else 0)
"""
STATIC = ("--master-addr", "127.0.0.1", "--checkpoint-every", "0")


def digest(text: str) -> str:
    (found,) = re.findall(r"digest=(sha256:\w+)", text)
    return str(found)


def test_a_kill_goes_on_from_the_memory_of_both(lockstep: Lockstep) -> None:
    script = lockstep.script(SCRIPT)
    undisturbed = lockstep.python(script)
    assert undisturbed.code == 0, undisturbed.err
    words = ("--nnodes", "2", *STATIC, "-n", "2", "--strategy", "fsdp", "--run-dir", "run")
    started = [
        lockstep.start("run", "--node-rank", str(node), *words, script, "--", "die")
        for node in (0, 1)
    ]
    done = [lockstep.finish(process, timeout=120) for process in started]
    assert [one.code for one in done] == [0, 0], done
    assert digest(done[0].out) == digest(undisturbed.out)
    generations = json.loads((lockstep.directory / "run/run.json").read_text())["generations"]
    assert len(generations) == 2
    assert 0 < generations[1]["step"] <= 42, "there was a snapshot"
    assert "memory" in str(generations[1]), generations
