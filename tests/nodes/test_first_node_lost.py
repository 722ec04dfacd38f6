"""A training whose first node is lost for good: the other one goes on, to the same weights (B1, B3)."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Lockstep
from tests.hosts import Hosts, wait_until

pytestmark = [pytest.mark.forked, pytest.mark.ranks(4)]

SCRIPT = """
import os, sys, time
from pathlib import Path
import torch, torch.nn.functional as F
from torch.utils.data import TensorDataset
import lockstep

with lockstep.Run("lost", replicas=4, threads=1, progress=False) as run:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (96,), generator=generator)
    data = TensorDataset(torch.randn(96, 4, generator=generator), labels)
    layers = [torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)]
    model = run.model(torch.nn.Sequential(*layers))
    optimizer = run.optimizer(torch.optim.AdamW(model.parameters(), lr=0.01))
    loader = run.loader(data, batch_size=16, shuffle=True)
    for _ in run.epochs(20):
        for x, y in loader:
            run.backward(F.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
        if len(sys.argv) > 1:
            time.sleep(0.1)
            if run.is_main_process:
                Path(sys.argv[1]).write_text(str(run.step))
"""


def digest(text: str) -> str:
    (found,) = re.findall(r"digest=(sha256:\w+)", text)
    return str(found)


def test_the_first_node_is_lost_for_good(hosts: Hosts, lockstep: Lockstep, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "rendezvous").mkdir()
    made = [hosts.host(name) for name in "ab"]
    hosts.plug_all(hosts.switch(), made)
    step = tmp_path / "step"
    rendezvous = f"file://{tmp_path}/rendezvous"
    words = (
        *("run", "-n", "2", "--nnodes", "1:2", "--rdzv-endpoint", rendezvous, "--run-dir", "run"),
        *("--last-call", "20", "train.py", str(step)),
    )
    command = (sys.executable, "-m", "lockstep", *words)
    first = made[0].start(*command, cwd=tmp_path)
    wait_until(lambda: any((tmp_path / "rendezvous").iterdir()), "the rendezvous did not begin")
    second = made[1].start(*command, cwd=tmp_path)
    wait_until(
        lambda: step.exists() and int(step.read_text() or 0) >= 24, "step 24 was not reached"
    )
    inside = subprocess.run(
        ["ip", "netns", "pids", made[0].namespace],  # noqa: S607
        capture_output=True,
        text=True,
        check=True,
    )
    for pid in inside.stdout.split():
        os.kill(int(pid), signal.SIGKILL)
    _, told = first.communicate(timeout=10)
    assert "4 ranks by 2 launchers: node 0 (a)" in told, "it was the first one"
    (done,) = hosts.finish([second])
    assert digest(done.out) == digest(lockstep.python("train.py").out)
    generations = json.loads((tmp_path / "run/run.json").read_text())["generations"]
    assert [one["ranks"] for one in generations] == [4, 2]
    assert generations[1]["source"] == "memory", "a survivor held it"
    assert generations[1]["step"] > 0
