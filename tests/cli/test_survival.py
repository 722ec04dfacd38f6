"""Around the workers: the launcher is killed, the disk is damaged, /dev/shm is small."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.forked

UNSHARE = shutil.which("unshare")

SCRIPT = """
import time
import torch
import lockstep

with lockstep.Run("survival", replicas=2, progress=True) as run:
    model = run.model(torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1)))
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    loader = run.loader([torch.tensor([float(i), 1.0]) for i in range(40)], batch_size=4, shuffle=True)
    for _ in run.epochs(6):
        for x in loader:
            time.sleep({pause})
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
"""


def digest(text: str) -> str:
    (found,) = re.findall(r"digest=(sha256:\w+)", text)
    return str(found)


def checkpoints(directory: Path) -> list[Path]:
    return sorted((directory / "run/checkpoints").glob("step-*"))


def test_the_launcher_is_killed_and_the_newest_checkpoint_is_damaged(lockstep):
    words = ("run", "-n", "2", "--run-dir", "run", "--checkpoint-every", "0.1", "train.py")
    lockstep.script(SCRIPT.format(pause=0.1))
    launcher = lockstep.start(*words)
    deadline = time.monotonic() + 40
    while len(checkpoints(lockstep.directory)) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert launcher.poll() is None, launcher.communicate()
    family = psutil.Process(launcher.pid).children(recursive=True)
    assert len(family) >= 3
    launcher.send_signal(signal.SIGKILL)
    lockstep.finish(launcher)
    assert not psutil.wait_procs(family, timeout=5)[1], "no orphan"

    good, damaged = checkpoints(lockstep.directory)[-2:]
    assert json.loads((lockstep.directory / "run/run.json").read_text())["status"] == "running"
    file = damaged / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    done = lockstep(*words)
    assert done.code == 0, done.err
    assert f"warning: the checkpoint {damaged} is skipped" in done.err
    step = int(good.name.removeprefix("step-"))
    assert f"resuming after step {step} ({good.name})" in done.err
    lockstep.script(SCRIPT.format(pause=0), "fast.py")
    # The script's name is part of what a run is, and not of what it computes.
    assert digest(done.out) == digest(lockstep.python("fast.py").out)


@pytest.mark.skipif(os.geteuid() != 0, reason="a small /dev/shm takes root to mount")
@pytest.mark.skipif(UNSHARE is None, reason="unshare is not installed")
def test_a_small_dev_shm_does_not_matter(lockstep):
    lockstep.script(SCRIPT.format(pause=0))
    words = ("run", "-n", "2", "--run-dir", "run", "train.py")
    mount = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    tried = subprocess.run([str(UNSHARE), "--mount", "true"], check=False, capture_output=True)
    if tried.returncode:
        pytest.skip(f"no mount namespace can be made here: {tried.stderr.decode().strip()}")
    small = ("--mount", "sh", "-c", mount, "sh", sys.executable, "-m", "lockstep")
    process = lockstep.start(
        *words, program=small, executable=str(UNSHARE), env={"LOCKSTEP_FAULTS": "kill@35"}
    )
    done = lockstep.finish(process)
    assert done.code == 0, done.err
    recorded = json.loads((lockstep.directory / "run/run.json").read_text())
    assert recorded["generations"][1]["source"] == "memory"
    assert digest(done.out) == digest(lockstep.python("train.py").out)
