"""What each layout is started with: flags and variables, of which some are only for servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.launch.command import RunCommand
from lockstep.tools.verify.layouts import Layout
from lockstep.tools.verify.running import LayoutResult, RunSpec
from lockstep.tools.verify.traces import Traces


def work(*of_servers: str) -> RunCommand:
    return RunCommand(["train.py"], [], of_servers)


def test_a_variable_says_how_many_servers_there_are() -> None:
    assert work().words("ps", {"LOCKSTEP_SERVERS": "3"}) == ["--strategy", "ps"]


def test_variables_of_servers_go_to_the_strategy_that_has_them() -> None:
    environ = {
        "PET_NNODES": "2",
        "PATH": "/bin",
        "LOCKSTEP_SERVERS": "2",
        "LOCKSTEP_STALENESS": "0",
        "LOCKSTEP_FAULTS": "kill@1",
    }
    assert work().environ("ddp", environ) == {"PATH": "/bin", "LOCKSTEP_STALENESS": "0"}
    assert set(work().environ("ps", environ)) == {"PATH", "LOCKSTEP_SERVERS", "LOCKSTEP_STALENESS"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Note what would be started instead of starting it."""
    lines: list[str] = []

    def run(layout: Layout, work: RunSpec, _: Path, steps: int) -> LayoutResult:
        lines.append(" ".join([layout.name, *work.command.words(layout.strategy, {})]))
        return LayoutResult(layout, 0, "sha256:0", 1, 0.0, 0, 1, (Traces(),), "")

    monkeypatch.setattr("lockstep.tools.verify.running.run", run)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    return lines


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--strategies ddp,ps --servers 2", ["--strategy ddp", "--strategy ps --servers 2"]),
        ("--strategies ddp,ps", ["--strategy ddp", "--strategy ps --servers 1"]),
        ("--strategy ps", ["--strategy ps --servers 1"]),
        ("--strategy ps --servers 3", ["--strategy ps --servers 3"]),
        ("--servers 3", ["--servers 3"]),
        (
            "--strategies ddp,ps --no-exact --staleness 1 --precision bf16 --sync-every 3",
            [
                "--no-exact --sync-every 3 --staleness 1 --precision bf16 --strategy ddp",
                "--no-exact --sync-every 3 --staleness 1 --precision bf16 --strategy ps --servers 1",
            ],
        ),
    ],
)
def test_from_the_command_line(started: list[str], flags: str, expected: list[str]) -> None:
    assert main(["verify", *flags.split(), "--layouts", "1,2", "train.py"]) == 0
    assert started == [f"{layout} {words}" for words in expected for layout in "12"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--strategy ddp --strategies ddp,ps", "--strategy ddp beside --strategies ddp,ps"),
        ("--strategies ddp,fsdp --servers 2", "--servers beside --strategies ddp,fsdp, which"),
        ("--strategy ddp --servers 1", "--servers beside --strategy ddp, which knows no servers"),
    ],
)
def test_what_does_not_go_together(
    started: list[str], capsys: pytest.CaptureFixture[str], flags: str, said: str
) -> None:
    assert main(["verify", *flags.split(), "train.py"]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert "hint: " in err
    assert started == []
