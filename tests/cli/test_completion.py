"""The completion scripts, in the shells that read them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lockstep.cli import main
from tests.terminal import Terminal

#: What is typed, and what the shell makes of it; there are `train.py` and the directory `runs`.
COMPLETED = [
    ("lockstep ru", "run"),
    ("lockstep verify --lay", "--layouts"),
    ("lockstep run -n 2 --strategy pip", "pipeline"),
    ("lockstep run -n 2 tra", "train.py"),
    ("lockstep report ru", "runs/"),
    ("lockstep completion z", "zsh"),
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with things to complete."""
    (tmp_path / "train.py").touch()
    (tmp_path / "runs").mkdir()
    return tmp_path


def _script(shell: str, place: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}: apt-get install {shell}")
    assert main(["completion", shell]) == 0
    path = place / f"completion.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


def _ask(place: Path, *words: str) -> list[str]:
    done = subprocess.run(words, cwd=place, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return [line.partition("\t")[0] for line in done.stdout.splitlines()]


def test_bash(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = f'eval "$(cat {_script("bash", place, capsys)})"\n'
    for typed, _ in COMPLETED:
        script += (
            f"COMP_WORDS=({typed}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _shtab_lockstep\n"
        )
        script += "echo ${COMPREPLY[@]}\n"
    found = _ask(place, "bash", "--norc", "-c", script)
    assert found == [word.rstrip("/") for _, word in COMPLETED]


def test_fish(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _script("fish", place, capsys)
    for typed, word in COMPLETED:
        asked = f"source {script}; complete -C '{typed}'"
        assert _ask(place, "fish", "--no-config", "-c", asked) == [word]


def test_zsh(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = _script("zsh", place, capsys)
    terminal = Terminal(place)
    try:
        terminal.type("zsh -f")
        terminal.until(r"(?s)zsh -f.*[#%]\s*\Z")
        read = f'autoload -Uz compinit && compinit -u -D; eval "$(cat {script})"'
        terminal.type(f"PS1='> '; {read}; clear")
        terminal.until(r"\A>\s*\Z")
        for typed, word in COMPLETED:
            terminal.keys("C-u")
            terminal.keys(*typed.replace(" ", " Space ").split(), "Tab")
            terminal.until(rf"(?m)^> .* {word}\s*$")
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("words", "code"), [(["completion", "bash"], 141), (["completion", "--help"], 0)]
)
def test_a_reader_that_has_left_is_no_error(
    words: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as out:
        monkeypatch.setattr(sys, "stdout", out)
        try:
            ended = main(words)
        except SystemExit as end:
            ended = end.code
    assert ended == code
