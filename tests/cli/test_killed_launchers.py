"""Launchers that are killed: what the next one finds, and that nothing is lost or done twice."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import Lockstep

pytestmark = pytest.mark.forked

#: How many launchers are killed, by default and with LOCKSTEP_LAUNCHER_KILLS=20, and the seed of when.
KILLS = int(os.environ.get("LOCKSTEP_LAUNCHER_KILLS", "3"))
SEED = int(os.environ.get("LOCKSTEP_LAUNCHER_SEED", "0"))

SCRIPT = """
import time
import torch
import lockstep

with lockstep.Run("killed", replicas=4, progress=False) as run:
    net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(), torch.nn.Linear(64, 1))
    model = run.model(net)
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.01))
    data = [torch.full((8,), float(i % 7)) for i in range(240)]
    loader = run.loader(data, batch_size=8, shuffle=True)
    for _ in run.epochs(4):
        for x in loader:
            run.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.005)
            run.save()
            open("step", "w").write(str(run.step))
"""


def digest(text: str) -> str:
    (found,) = re.findall(r"digest=(sha256:\w+)", text)
    return found


@pytest.mark.wide
@pytest.mark.ranks(3)
def test_launchers_killed_while_checkpoints_are_written(lockstep: Lockstep) -> None:
    # Long enough for any of them to be killed on the way.
    lockstep.script(SCRIPT.replace("epochs(4)", f"epochs({4 + 2 * KILLS})"))
    undisturbed = lockstep("run", "--run-dir", "whole", "train.py", timeout=120)
    assert undisturbed.code == 0, undisturbed.err
    rng, reached = random.Random(SEED), []
    for kill in range(KILLS):
        step = lockstep.directory / "step"
        step.unlink(missing_ok=True)
        ranks = str(rng.choice([1, 2, 3]))
        launcher = lockstep.start("run", "-n", ranks, "--run-dir", "run", "train.py")
        while not step.exists() and launcher.poll() is None:
            time.sleep(0.005)
        time.sleep(rng.uniform(0.0, 0.4))
        launcher.kill()
        killed = lockstep.finish(launcher)
        assert killed.code == -signal.SIGKILL, (kill, killed)
        reached.append((ranks, step.read_text()))
    sys.stdout.write(f"ranks and steps: {reached}\n")  # with -s
    done = lockstep("run", "-n", "2", "--run-dir", "run", "train.py", timeout=120)
    assert done.code == 0, done.err
    assert digest(done.out) == digest(undisturbed.out)


def test_a_script_that_fails_after_its_run_has_not_finished(lockstep: Lockstep) -> None:
    body = "import os\nopen('model', 'w').close()\nassert os.environ.get('FAILS') is None\n"
    lockstep.script(SCRIPT.replace("epochs(4)", "epochs(1)") + body)
    words = ("run", "--run-dir", "run", "train.py")
    assert lockstep(*words, env={"FAILS": "1"}).code == 1
    again = lockstep(*words)
    assert again.code == 1, "what follows the run is not done"
    assert "is finished; expected a new or an unfinished one" in again.err
    assert lockstep(*words, "--fresh").code == 1, "an argument of the script"
    assert lockstep("run", "--fresh", *words[1:]).code == 0
    again = lockstep(*words)
    assert again.code == 0, again.err
    assert "lockstep: finished already steps=30 " in again.err


def test_the_directory_of_a_killed_launcher_is_removed_by_the_next(lockstep: Lockstep) -> None:
    lockstep.script(
        "import os, time\nopen('here', 'w').write(os.environ['TORCHELASTIC_ERROR_FILE'])\n"
        "time.sleep(float(os.environ.get('LINGERS', 0)))\n"
    )
    launcher = lockstep.start("run", "train.py", env={"LINGERS": "60"})
    (file,) = lockstep.wait_for("here")
    left = Path(file).parent
    children = psutil.Process(launcher.pid).children(recursive=True)
    launcher.kill()
    lockstep.finish(launcher)
    assert not psutil.wait_procs(children, timeout=10)[1]
    assert left.is_dir()
    logs = (left / "logs").resolve()
    assert (logs / "rank-0.log").is_file()
    lives = lockstep.start("run", "train.py", env={"LINGERS": "2"})
    assert lockstep("run", "train.py").code == 0
    assert not left.exists()
    assert not logs.exists()
    assert lockstep.finish(lives).code == 0, "a launcher that lives keeps its own"
