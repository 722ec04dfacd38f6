"""`lockstep replay` and `lockstep branch`: the recorded bits again, what is named if they are others."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from lockstep.state.record.steps import read
from tests.conftest import Lockstep
from tests.terminal import Terminal

pytestmark = pytest.mark.forked

SCRIPT = """
import sys, torch, torch.nn.functional as F, lockstep
from torch import nn
from torch.utils.data import TensorDataset

RATE, SPOILT = float(sys.argv[1]), int(sys.argv[2])
with lockstep.Run("recorded", replicas=3) as run:
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 2)
    model = run.model(nn.Sequential(*layers))
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=RATE))
    scheduler = run.scheduler(torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9))
    inputs = torch.randn(30, 4)
    if SPOILT >= 0:
        inputs[SPOILT] = float("nan")
    train = run.loader(TensorDataset(inputs, torch.arange(30) % 2), batch_size=8, shuffle=True)
    for epoch in run.epochs(7):
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        scheduler.step()
"""
STEPS = 28


def recorded(lockstep: Lockstep, *arguments: str, ranks: str = "2") -> Path:
    """Return the directory of a finished run."""
    lockstep.script(SCRIPT)
    done = lockstep(
        "run", "-n", ranks, "--run-dir", "run", "train.py", *(arguments or ("0.1", "-1"))
    )
    assert done.code == 0, done.err
    return lockstep.directory / "run"


def listing(directory: Path) -> list[tuple[str, int, bytes]]:
    """Return the path, time of change and content of each file."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return [(str(path), path.stat().st_mtime_ns, path.read_bytes()) for path in files]


def disturbed(lockstep: Lockstep) -> Path:
    """Return the directory of a run on 3 ranks, of which one is killed, and then on 2 ranks."""
    lockstep.script(SCRIPT)
    words = "run", "--run-dir", "run", "--anchors", "8", "--keep", "1", "--hash-every", "1"
    env = {"LOCKSTEP_FAULTS": "kill@6,term@17"}
    first = lockstep(*words, "-n", "3", "train.py", "0.1", "-1", env=env)
    assert first.code == 75, first.err
    second = lockstep(*words, "-n", "2", "train.py", "0.1", "-1")
    assert second.code == 0, second.err
    return lockstep.directory / "run"


def replayed(lockstep: Lockstep, step: int) -> dict[str, Any]:
    """Return the result of the replay of a step of the run `run`."""
    done = lockstep("replay", "run", "--step", str(step), "--json", timeout=120)
    assert done.code == 0, done.err + done.out
    result: dict[str, Any] = json.loads(done.out)
    return result


@pytest.mark.parametrize("count", [3, pytest.param(20, marks=pytest.mark.wide)])
def test_steps_of_a_disturbed_run_are_computed_again(lockstep: Lockstep, count: int) -> None:
    directory = disturbed(lockstep)
    before = listing(directory)
    entries = read(directory)
    assert len(entries) == STEPS * (
        3 + 2
    )  # losses of 3 replicas, and hashes of gradients and parameters
    states = {int(path.name[5:13]) for path in (directory / "checkpoints").iterdir()}
    assert states >= {8, 16, 24}, "anchors"
    steps = random.sample(range(1, STEPS + 1), count)
    for step in steps:
        result = replayed(lockstep, step)
        assert result["same"] is True
        assert result["step"] == step
        assert result["compared"] == 5
        assert result["begin"] == max(at for at in {0, *states} if at < step)
        seen = [sample for one in result["samples"] for sample in one["samples"]]
        assert len(set(seen)) == len(seen) == (6 if step % 4 == 0 else 8)
        assert [loss["bits"] for loss in result["losses"]] == [
            entries[step, 0, replica, 0].value.hex() for replica in range(3)
        ]
    assert listing(directory) == before


def test_the_first_difference_of_a_changed_script_is_named(lockstep: Lockstep) -> None:
    recorded(lockstep)
    lockstep.script(SCRIPT.replace("epoch in run.epochs(7):", "epoch in run.epochs(7):\n" + CHANGE))
    assert lockstep("replay", "run", "--until", "8").code == 0
    done = lockstep("replay", "run", "--until", "20")
    assert done.code == 3
    assert "first difference: step 9, replica 0: the loss: " in done.out
    assert "train.py has changed since the run" in done.err


CHANGE = """        if epoch == 2:
            model[0].weight.data[0, 0] += 1
"""


def test_data_that_has_changed_is_named(lockstep: Lockstep) -> None:
    directory = recorded(lockstep)
    path = directory / "run.json"
    content = json.loads(path.read_text())
    content["provenance"]["command"]["arguments"] = ["0.1", "29"]  # another sample in its place
    path.write_text(json.dumps(content))
    done = lockstep("replay", "run", "--until", "4", "--json")
    result = json.loads(done.out)
    assert done.code == 3
    assert result["same"] is False
    assert "the loss: " in result["difference"]
    assert any("the data of loader 0: values: " in note for note in result["notes"])


def test_a_damaged_state_is_passed_over_and_the_script_begins_at_its_start(
    lockstep: Lockstep,
) -> None:
    lockstep.script(SCRIPT)
    lockstep(
        "run", "--run-dir", "run", "--anchors", "20", "--hash-every", "4", "train.py", "0.1", "-1"
    )
    (file,) = (lockstep.directory / "run" / "checkpoints" / "step-00000020").glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    done = lockstep("replay", "run", "--step", "24", "-n", "3")
    assert done.code == 0, done.err
    assert "step-00000020 is skipped: " in done.err
    assert "replayed from the start of the script" in done.out
    assert "same: yes (5 values compared)" in done.out
    done = lockstep("replay", "run", "--step", "25")
    assert "same: yes (3 values compared)" in done.out  # hashes are due in every fourth step


def test_a_nan_is_found_in_the_debugger(lockstep: Lockstep) -> None:
    directory = recorded(lockstep, "0.1", "17")
    entries = read(directory)
    nan = b"\x00\x00\xc0\x7f"
    step, replica = min((k.step, k.replica) for k, e in entries.items() if e.value == nan)
    result = replayed(lockstep, step)
    own = next(one["samples"] for one in result["samples"] if one["replica"] == replica)
    assert 17 in own
    terminal = Terminal(lockstep.directory)
    try:
        command = f"{sys.executable} -m lockstep replay run --step {step} --replica {replica} --pdb"
        terminal.type(command)
        terminal.until(r"train.py\(\d+\)<module>\(\)\n-> loss = F.cross_entropy[^\n]*\n\(Pdb\)", 60)
        terminal.type("p x.isnan().any(1).tolist(), 'own'")
        expected = ", ".join(str(sample == 17) for sample in own)
        terminal.until(rf"\(\[{expected}\], 'own'\)")
        terminal.type("c")
        terminal.until("same: yes")
    finally:
        terminal.close()
    done = lockstep("replay", "run", "--step", str(step), "--anomaly")
    assert done.code == 1
    assert "returned nan values" in done.err


def test_a_branch_has_its_parents_result_or_its_own_settings(lockstep: Lockstep) -> None:
    directory = recorded(lockstep)
    before = listing(directory)
    digest = json.loads((directory / "run.json").read_text())["digest"]
    done = lockstep("branch", "run", "--step", "9", "-n", "3", "--run-dir", "same")
    assert done.code == 0, done.err
    assert "computed again, since there is no checkpoint of it" in done.err
    assert f"digest={digest}" in done.out
    done = lockstep("branch", "run", "--step", "9", "--run-dir", "other", "--", "0.05", "-1")
    assert "lr of optimizer 0: 0.1 in the parent, 0.05 here" in done.err
    assert f"digest={digest}" not in done.out
    content = json.loads((lockstep.directory / "other" / "run.json").read_text())
    assert content["parent"]["directory"] == str(directory)
    assert content["parent"]["step"] == 9
    assert listing(directory) == before
    shutil.rmtree(directory)  # a branch needs its parent no more
    again = lockstep("replay", "other", "--step", "11")
    assert again.code == 0, again.err
    lockstep("report", "other")
    assert f"{directory}, step 9" in (lockstep.directory / "other" / "report.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["replay", "run"], "neither --step nor --until is given"),
        (
            ["replay", "run", "--step", "29"],
            "step 29 was never reached: the run has recorded 28 steps",
        ),
        (["replay", "run", "--step", "0"], "expected 1 <= step <= until"),
        (["replay", "run", "--step", "5", "--until", "4"], "expected 1 <= step <= until"),
        (["replay", "run", "--step", "5", "--replica", "3"], "expected 0 to 2"),
        (["replay", "run", "--step", "5", "--pdb", "-n", "2"], "expected one rank"),
        (["replay", "run/logs", "--step", "5"], "has no run.json"),
        (["branch", "run", "--step", "29"], "step 29 was never reached"),
        (
            ["branch", "run", "--step", "28", "--run-dir", "run"],
            "run has a run; expected a new directory",
        ),
    ],
)
def test_wrong_usage_is_refused(past: Lockstep, words: list[str], message: str) -> None:
    done = past(*words)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err


@pytest.fixture
def past(lockstep: Lockstep, a_run: Path) -> Lockstep:
    """The command, beside a copy of a finished run."""
    shutil.copytree(a_run, lockstep.directory / "run")
    return lockstep


@pytest.fixture(scope="module")
def a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a finished run, whose script is still there."""
    command = Lockstep(tmp_path_factory.mktemp("run"), None, tmp_path_factory.mktemp("t"))
    return recorded(command)


def test_what_is_gone_is_named(past: Lockstep) -> None:
    path = past.directory / "run" / "run.json"
    content = json.loads(path.read_text())

    def refused(*words: str, code: int = 2) -> str:
        path.write_text(json.dumps(content))
        done = past("replay", "run", "--step", "3", *words)
        assert done.code == code
        return done.err

    command = content["provenance"]["command"]
    command["script"] += ".gone"
    gone = refused(code=125)  # `git bisect run` skips a commit without the script
    assert "train.py.gone, the script of the recorded command, is gone" in gone
    command["run"] = 1
    assert "is run number 2 of its script; expected the first one" in refused()
    del content["provenance"]
    assert "does not record how its script was started" in refused()
