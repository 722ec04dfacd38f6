"""A system for jobs is one file: it has its own flags, and `lockstep submit` follows its jobs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.tools.submit import backends, job

MADE_UP = """
from lockstep.tools.submit.backend import Backend, JobState, Submission

class MadeUp(Backend):
    title = "The made-up cluster"
    program = "send"
    states = [
        JobState(phase="waiting", text="waits for a machine"),
        JobState(phase="running", text="runs on m1"),
        JobState(phase="ended", text="was stopped", hint="ask for more time", exit_code=3),
    ]

    def add_flags(self, group):
        group.add_argument("--queue")

    def options(self, options):
        return (f"queue={options.queue}",)

    def script(self, request, run_dir):
        return f"{request.options} {request.nodes} {request.command} {run_dir.name}"

    def submit(self, script):
        (script.parent / "out").write_text("epoch 1\\n")
        return Submission("j7", warnings="the queue is long")

    def state(self, job):
        return self.states.pop(0)

    def output(self, run_dir, job):
        return run_dir / "out"

    def logs(self, job):
        return 0

    def cancel(self, job):
        return ""

    def commands(self, job=""):
        return f"show {job}"

BACKEND = MadeUp()
"""


def test_another_backend_is_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "_ASK", (0.0, 0.0))
    monkeypatch.setattr(job, "_LAST_WORDS", 0.0)
    monkeypatch.setattr(backends, "__path__", [*backends.__path__, str(tmp_path / "more")])
    (tmp_path / "more").mkdir()
    (tmp_path / "more/made_up.py").write_text(MADE_UP)
    (tmp_path / "train.py").touch()
    words = ["submit", "--backend", "made_up", "--queue", "fast", "--nodes", "2"]
    try:
        code = main([*words, "--run-dir", "mine", "train.py", "--lr", "1"])
    finally:
        sys.modules.pop(f"{backends.__name__}.made_up", None)
    said = capsys.readouterr()
    assert (code, said.out) == (3, "epoch 1\n")
    assert said.err.splitlines() == [
        "lockstep: send says: the queue is long",
        "lockstep: job j7 submitted: mine/job.sh",
        "lockstep: its output: mine/out",
        "lockstep: job j7 waits for a machine",
        "lockstep: job j7 runs on m1",
        "lockstep: job j7 was stopped; output: mine/out",
        "hint: ask for more time",
    ]
    assert (tmp_path / "mine/job.sh").read_text() == (
        "('queue=fast',) 2 ('train.py', '--lr', '1') mine"
    )


def test_a_name_that_no_backend_has(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--backend", "nowhere", "train.py"]) == 2
    assert "invalid choice: 'nowhere'" in capsys.readouterr().err
