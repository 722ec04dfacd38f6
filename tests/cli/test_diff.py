"""`lockstep diff`, `lockstep attest`, and `git bisect run lockstep replay`, on runs of a script in git."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Lockstep

pytestmark = pytest.mark.forked

SCRIPT = """
import sys, torch, torch.nn.functional as F, lockstep
from torch import nn
from torch.utils.data import Dataset
from factor import FACTOR

class Samples(Dataset):
    def __init__(self):
        self.inputs = torch.randn(12, 4)

    def __len__(self):
        return 12

    def __getitem__(self, n):
        return self.inputs[n] * (2 if n == int(sys.argv[1]) else 1), n % 2

with lockstep.Run("compared", replicas=2) as run:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 2))
    with torch.no_grad():
        model[2].weight *= FACTOR
    model = run.model(model)
    optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=0.1))
    train = run.loader(Samples(), batch_size=4, shuffle=True)
    for x, y in (batch for epoch in run.epochs(2) for batch in train):
        loss = F.cross_entropy(model(x), y)
        run.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
"""
#: What each commit has in `factor.py`: the third fails, and the fifth changes an initial value.
FACTORS = (
    "FACTOR = 1",
    "FACTOR = 1.0",
    "FACTOR =",
    "FACTOR = 2 - 1",
    "FACTOR = 1.5",
    "FACTOR = 3 / 2",
)


def git(directory: Path, *words: str) -> str:
    """Run git in a repository; return what it prints."""
    names = {
        f"GIT_{who}_{what}": "me" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")
    }
    command = ["git", *words]
    return subprocess.run(
        command,
        cwd=directory,
        env=os.environ | names,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Lockstep:
    """The command in a repository whose runs are `first`, of its first commit, `last` and `spoilt`."""
    lockstep = Lockstep(tmp_path_factory.mktemp("git"), None, tmp_path_factory.mktemp("t"))
    place = lockstep.directory
    git(place, "init", "-q")
    lockstep.script(SCRIPT)
    for factor in FACTORS:
        (place / "factor.py").write_text(factor + "\n")
        git(place, "add", "train.py", "factor.py")
        git(place, "commit", "-q", "-m", factor)
        if factor == FACTORS[0]:
            made(lockstep, "first", "-1")
    made(lockstep, "last", "-1")
    made(lockstep, "spoilt", "7")
    return lockstep


def made(lockstep: Lockstep, name: str, spoilt: str) -> None:
    """Make a run in which the sample `spoilt` has different values."""
    words = "run", "--run-dir", name, "--anchors", "4", "--hash-every", "1", "train.py", spoilt
    done = lockstep(*words)
    assert done.code == 0, done.err


@pytest.fixture
def past(lockstep: Lockstep, runs: Lockstep) -> Callable[[str], Path]:
    """Return a function that copies a run to the test's own directory."""
    return lambda name: Path(
        shutil.copytree(runs.directory / name, lockstep.directory / name, symlinks=True)
    )


def test_a_run_records_its_commit(runs: Lockstep) -> None:
    def recorded(name: str) -> object:
        return json.loads((runs.directory / name / "run.json").read_text())["provenance"]["git"]

    assert recorded("first") == {
        "commit": git(runs.directory, "rev-parse", "HEAD~5"),
        "dirty": False,
    }
    assert recorded("last") == {"commit": git(runs.directory, "rev-parse", "HEAD"), "dirty": False}


def test_the_layer_with_another_initial_value_is_found(runs: Lockstep) -> None:
    done = runs("diff", "first", "last", "--json", timeout=120)
    assert done.code == 3, done.err
    result = json.loads(done.out)
    assert result["same"] is False
    assert result["step"] == 1
    assert result["parameters"] == ["2.weight"]
    module = result["module"]
    assert (module["name"], module["class"], module["replica"]) == ("2", "Linear", 0)
    assert module["same_input"] is True
    commits = [git(runs.directory, "rev-parse", at) for at in ("HEAD~5", "HEAD")]
    assert f"commit: {commits[0]} in A, {commits[1]} in B" in result["unlike"]
    assert "factor.py differs" in result["unlike"]
    assert (
        result["notes"] == []
    )  # each replay agrees with its record: A had the script of its commit


def test_the_sample_with_other_values_is_found(runs: Lockstep) -> None:
    done = runs("diff", "last", "spoilt", timeout=120)
    assert done.code == 3, done.err
    lines = done.out.splitlines()
    assert lines[0] == "arguments: ['-1'] in A, ['7'] in B"
    found = re.fullmatch(r"first difference: (step \d), (replica \d): the loss: .* in B", lines[1])
    assert found is not None
    place = f"{found[1]}, first module 0 (Linear) of {found[2]}"
    assert lines[2] == f"replayed: {place}: other input, first sample 7"
    assert lines[3] == "same: no (24 values compared)"


def test_runs_with_the_same_bits_and_runs_without_a_script(
    lockstep: Lockstep, past: Callable[[str], Path]
) -> None:
    first, last = past("first"), past("last")
    done = lockstep("diff", "first", "first")
    assert (done.code, done.out) == (0, "same: yes (24 values compared)\n")
    content = json.loads((last / "run.json").read_text())
    content["provenance"]["command"]["script"] += ".gone"
    (last / "run.json").write_text(json.dumps(content))
    done = lockstep("diff", "first", "last")
    assert done.code == 3
    assert "note: not replayed: " in done.err
    assert "train.py.gone, the script of the recorded command, is gone" in done.err
    assert "first difference: step 1, replica 0: the loss: " in done.out
    shutil.rmtree(first / "steps")
    content["digest"] = "sha256:other"
    (last / "run.json").write_text(json.dumps(content))
    done = lockstep("diff", "first", "last")
    assert "first difference: the end: digest: sha256:" in done.out
    content["status"] = "running"
    del content["digest"]
    (last / "run.json").write_text(json.dumps(content))
    done = lockstep("diff", "first", "last")
    assert done.code == 2
    assert "the two runs have no recorded values of the same steps" in done.err


def test_git_bisect_finds_the_commit_that_changed_bits(runs: Lockstep) -> None:
    """It skips the commit whose script fails."""
    place = runs.directory
    command = sys.executable, "-m", "lockstep", "replay", "first", "--until", "2"
    git(place, "bisect", "start", "HEAD", "HEAD~5")
    try:
        found = git(place, "bisect", "run", *command)
        log = git(place, "bisect", "log")
    finally:
        git(place, "bisect", "reset")
    bad = git(place, "rev-parse", "HEAD~1")
    assert re.search(f"{bad} is the first '?bad'? commit", found)  # newer versions of git quote it
    assert f"# skip: [{git(place, 'rev-parse', 'HEAD~3')}]" in log


def test_an_attested_run_is_confirmed_and_changes_are_found(
    lockstep: Lockstep, past: Callable[[str], Path]
) -> None:
    if shutil.which("ssh-keygen") is None:
        pytest.skip("needs keys: apt-get install openssh-client")
    run = past("last")
    for name in ("own", "other"):
        path = lockstep.directory / name
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)]
        subprocess.run(command, check=True, timeout=60)
        (lockstep.directory / f"{name}.signers").write_text(
            f"me {path.with_suffix('.pub').read_text()}"
        )
    done = lockstep("attest", "last", "--key", "own")
    assert done.code == 0, done.err
    words = "attest", "--check", "last/attestation.json"
    done = lockstep(*words, "--segments", "2", "--signers", "own.signers", timeout=120)
    assert done.code == 0, done.err
    assert 'Good "lockstep" signature for me with ED25519 key' in done.out
    assert done.out.count("steps ") == 2
    assert "same: yes, on this hardware, with these versions" in done.out

    def refused(*more: str) -> str:
        found = lockstep(*words, "--segments", "0", *more)
        assert found.code == 3, found.err
        return found.err

    assert "ssh-keygen -Y find-principals: " in refused("--signers", "other.signers")
    attestation = run / "attestation.json"
    original = attestation.read_text()
    content = json.loads(original)
    content["links"]["digest"] = "0" * 64
    attestation.write_text(json.dumps(content))
    assert "ssh-keygen -Y check-novalidate: " in refused()
    attestation.write_text(json.dumps({**content, "signature": None}))
    assert "digest: the record in " in refused()
    assert "is not signed" in refused("--signers", "own.signers")
    attestation.write_text(original)
    (steps,) = (run / "steps").glob("*.bin")
    data = bytearray(steps.read_bytes())
    data[-1] ^= 1
    steps.write_bytes(data)
    assert "steps 6 to 6: the record in " in refused()
    data[-1] ^= 1
    steps.write_bytes(data)
    assert lockstep(*words, "--segments", "0").code == 0
    (state,) = (run / "checkpoints" / "step-00000004").glob("*.distcp")
    state.write_bytes(b"x" + state.read_bytes()[1:])
    assert "a different checksum than when it was written" in refused()
    shutil.rmtree(state.parent)
    assert "step-00000004: the record in " in refused()


def test_a_record_that_no_replay_meets_is_found(
    lockstep: Lockstep, past: Callable[[str], Path]
) -> None:
    """The records may have been changed before; a note names another version of torch."""
    run = past("last")
    content = json.loads((run / "run.json").read_text())
    content["identity"]["versions"]["torch"] = "0.9"
    (run / "run.json").write_text(json.dumps(content))
    (steps,) = (run / "steps").glob("*.bin")
    data = bytearray(steps.read_bytes())
    data[16] ^= 1  # of the first loss
    steps.write_bytes(data)
    assert lockstep("attest", "last").code == 0
    done = lockstep("attest", "--check", "last/attestation.json", "--segments", "100", "--json")
    assert done.code == 3
    result = json.loads(done.out)
    assert result["difference"].startswith("step 1, replica 0: the loss: ")
    assert any(note.startswith("torch: 0.9 recorded, ") for note in result["notes"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["attest"], "neither RUN_DIR nor --check is given"),
        (["attest", "run"], "has not ended, or has no step record"),
        (
            ["attest", "--check", "run/run.json"],
            "run/run.json is no attestation: KeyError('links')",
        ),
        (["attest", "--check", "run/run.json", "--segments", "-1"], "--segments -1"),
        (["diff", "run", "run/logs"], "has no run.json"),
    ],
)
def test_wrong_usage_is_refused(
    lockstep: Lockstep, past: Callable[[str], Path], words: list[str], message: str
) -> None:
    file = past("first").rename(lockstep.directory / "run") / "run.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "status": "running"}))
    done = lockstep(*words)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
