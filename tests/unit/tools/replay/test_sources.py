"""The script of a recorded commit: where a replay finds it, and when the script of now is taken."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lockstep.tools.replay.recorded import RecordedRun

WORDS = ["-c", "user.name=me", "-c", "user.email=me"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose file `code/train.py` has changed since its commit."""
    place = tmp_path / "repository"
    (place / "code").mkdir(parents=True)
    (place / "code" / "train.py").write_text("first\n")
    for words in ["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]:
        subprocess.run(["git", *WORDS, *words], cwd=place, check=True)  # noqa: S607
    (place / "code" / "train.py").write_text("second\n")
    return place


def recorded(place: Path, **changes: Any) -> RecordedRun:
    """Return a run of the first commit, with some fields of its provenance changed."""
    command = ["git", "rev-parse", "HEAD"]
    commit = subprocess.check_output(command, cwd=place, text=True).strip()
    script = str(place / "code" / "train.py")
    provenance = {
        "command": {"module": None, "script": script, "arguments": [], "directory": str(place)},
        "sources": {script: hashlib.sha256(b"first\n").hexdigest()},
        "git": {"commit": commit, "dirty": False},
    }
    return RecordedRun(place / "run", {"provenance": provenance | changes})


def test_a_changed_script_is_taken_from_its_commit(repository: Path, tmp_path: Path) -> None:
    run = recorded(repository)
    found = run.as_recorded(tmp_path / "source").content["provenance"]
    script = tmp_path / "source" / "code" / "train.py"
    assert script.read_text() == "first\n"
    assert found["command"]["script"] == str(script)
    assert found["command"]["directory"] == str(repository)  # of the data
    assert found["sources"] == {str(script): hashlib.sha256(b"first\n").hexdigest()}
    assert (repository / "code" / "train.py").read_text() == "second\n"


def test_a_module_is_started_in_the_directory_of_its_commit(
    repository: Path, tmp_path: Path
) -> None:
    run = recorded(repository)
    command = {**run.content["provenance"]["command"], "module": "code.train"}
    moved = recorded(repository, command=command).as_recorded(tmp_path / "source")
    assert moved.working_directory == tmp_path / "source"


def test_otherwise_the_script_of_now_is_taken(repository: Path, tmp_path: Path) -> None:
    script = repository / "code" / "train.py"
    same = {str(script): hashlib.sha256(b"second\n").hexdigest()}
    new = script.with_name("new.py")
    new.write_text("never committed\n")
    command = {**recorded(repository).content["provenance"]["command"], "script": str(new)}
    runs = [
        recorded(repository, sources=same),
        recorded(repository, git={}),
        recorded(repository, git={"commit": "0" * 40, "dirty": False}),
        recorded(repository, command=command),
    ]
    for n, run in enumerate(runs):
        assert run.as_recorded(tmp_path / f"source-{n}") is run
