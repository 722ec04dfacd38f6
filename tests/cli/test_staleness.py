"""`--staleness K` in real processes: one digest on any layout, at any speed, through kills (B11)."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.conftest import Lockstep
from tests.distributed.small import SCRIPT
from tests.template import Template

pytestmark = pytest.mark.forked

ROOT = Path(__file__).parents[2]

#: BatchNorm, dropout, a schedule, two optimizers, evaluation between loops and within one, a `break`.
LATE = """
import os, sys, time, torch, torch.nn.functional as F, lockstep
from torch import nn
from torch.utils.data import TensorDataset

def train(staleness):
    with lockstep.Run(f"late-{staleness}", replicas=6, staleness=staleness, progress=False) as run:
        assert run.exactness == "exact"
        labels = torch.arange(90) % 3
        data = TensorDataset(torch.eye(3)[labels] + 0.3 * torch.randn(90, 3), labels)
        parts = [nn.Linear(3, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3)]
        model = run.model(nn.Sequential(*parts))
        first = run.optimizer(torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9))
        rest = [p for part in model[1:] for p in part.parameters()]
        other = run.optimizer(torch.optim.AdamW(rest, lr=0.05))
        schedule = run.scheduler(torch.optim.lr_scheduler.ExponentialLR(first, 0.98))
        train, test = run.loader(data, batch_size=18, shuffle=True), run.loader(data, batch_size=30)
        seen = []

        def look():
            model.eval()
            with torch.no_grad():
                seen.append(run.mean(F.cross_entropy(model(x), y, reduction="none") for x, y in test))
            model.train()

        for epoch in run.epochs(3):
            model.train()
            for number, batch in enumerate(run.batches(train)):
                for x, y in batch:
                    run.backward(F.cross_entropy(model(x), y))
                    first.step()
                    if epoch != 1:
                        other.step()
                    schedule.step()
                    model.zero_grad()
                if run.world.rank == 1 and "SLOW" in os.environ:
                    time.sleep(0.01)
                if number == 1:
                    look()
                if epoch == 1 and number == 2:
                    break
            look()
        digest = run.digest()
        run.print("told", staleness, digest, *seen)

for staleness in (0, 1, 4):
    train(staleness)
"""
PS = ("--strategy", "ps")


def told(text: str) -> list[str]:
    return re.findall(r"^told (\d .*)$", text, re.MULTILINE)


@pytest.fixture(scope="module")
def alone(template: Template, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one process comes to, which keeps old parameters by itself."""
    command = Lockstep(tmp_path_factory.mktemp("alone"), template)
    done = command.python(command.script(LATE))
    command.close()
    found = told(done.out)
    assert len(found) == 3, done.err
    assert len({line.split()[1] for line in found}) == 3, "staleness makes other weights"
    return found


@pytest.mark.wide(beyond=1)
@pytest.mark.ranks(5)
@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (("-n", "2"), {}),
        (("-n", "1", *PS, "--servers", "1"), {}),
        (("-n", "2", *PS, "--servers", "1"), {"SLOW": "1"}),
        (("-n", "3", *PS, "--servers", "2"), {}),
    ],
    ids=["ddp", "one worker", "a slow worker", "3 workers, 2 servers"],
)
def test_one_digest_on_every_layout(
    lockstep: Lockstep, alone: list[str], words: tuple[str, ...], environ: dict[str, str]
) -> None:
    done = lockstep("run", *words, lockstep.script(LATE), env=environ, timeout=180)
    assert done.code == 0, done.err
    assert told(done.out) == alone
    assert "close" not in done.err
    assert "approximate" not in done.err


@pytest.mark.wide
@pytest.mark.ranks(3)
def test_kills_leave_no_trace(lockstep: Lockstep) -> None:
    """Of ranks, in a storm of them, and where the run goes on with fewer."""
    lockstep.script(SCRIPT.replace("epochs(2)", "epochs(6)"), "train.py")
    words = ["--layouts", "1", "2,kill@9", "2>1@5", "--strategies", "ddp,ps", "--staleness", "2"]
    words += ["--kills", "3", "--seed", "2", "--json"]
    done = lockstep("verify", *words, "train.py", timeout=300)
    assert done.code == 0, done.out + done.err
    verdict = json.loads(done.out)
    assert verdict["same"] is True
    assert {one["strategy"] for one in verdict["layouts"]} == {"ddp", "ps"}
    assert sum(one["generations"] > 1 for one in verdict["layouts"]) >= 4


@pytest.mark.wide
@pytest.mark.ranks(4)
def test_a_run_that_makes_room_goes_on_on_another_layout(lockstep: Lockstep) -> None:
    """What is saved has the versions that the next passes are to see."""
    slow = SCRIPT.replace("epochs(2)", "epochs(4)").replace(
        "                run.backward(",
        "                if 'SLOW' in os.environ:\n"
        "                    time.sleep(0.2)\n"
        "                    Path(os.environ['SLOW']).write_text('yes')\n"
        "                run.backward(",
    )
    script = lockstep.script("import os, time\nfrom pathlib import Path\n" + slow)
    late = ("--staleness", "3")
    expected = re.findall("digest=(.*)", lockstep("run", *late, script).out)
    words = (*late, "--run-dir", "r")
    layouts = (("first", ("-n", "2", *PS, "--servers", "2")), ("second", ("-n", "2")))
    for begun, more in layouts:
        process = lockstep.start("run", *words, *more, script, env={"SLOW": begun})
        lockstep.wait_for(begun)
        os.kill(process.pid, signal.SIGTERM)
        assert lockstep.finish(process).code == 75
    other = lockstep("run", "--staleness", "1", "--run-dir", "r", script)
    assert other.code == 1
    assert "staleness" in other.err, "it is another run"
    again = lockstep("run", *words, "-n", "1", *PS, "--servers", "1", script)
    assert "resuming after step" in again.err
    assert re.findall("digest=(.*)", again.out) == expected


@pytest.mark.wide
@pytest.mark.ranks(4)
def test_the_example_learns_from_late_gradients(lockstep: Lockstep) -> None:
    script = str(ROOT / "examples/parameter_server.py")
    late = ("--staleness", "4", "--epochs", "5")
    done = lockstep("run", "-n", "2", *PS, "--servers", "2", script, *late, timeout=180)
    assert done.code == 0, done.err
    accuracies = [
        float(one) for one in re.findall(r"^test accuracy ([\d.]+)%$", done.out, re.MULTILINE)
    ]
    assert len(accuracies) == 5
    assert accuracies[-1] > 90
    alone = lockstep("run", script, *late, timeout=180)
    assert re.findall("digest=(.*)", alone.out) == re.findall("digest=(.*)", done.out)
