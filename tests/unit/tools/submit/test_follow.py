"""Following a job, as a user sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from lockstep.errors import RunError
from lockstep.tools.submit import job
from lockstep.tools.submit.backend import JobState, NoAnswerError, UnknownJobError
from lockstep.tools.submit.backends import slurm

RUNNING = JobState(phase="running", text="runs on n1")
DONE = JobState(phase="ended", text="is done", has_run=True)
Step = JobState | Exception | BaseException


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterable[Step]], None]:
    """Let Slurm answer one thing after the other, without pauses."""
    monkeypatch.setattr(job, "_ASK", (0.0, 0.0))
    monkeypatch.setattr(job, "_LAST_WORDS", 0.0)

    def play(steps: Iterable[Step]) -> None:
        answers = iter(steps)

        def state(job: str) -> JobState:
            assert job == "12"
            answer = next(answers)
            if isinstance(answer, JobState):
                return answer
            raise answer

        monkeypatch.setattr(slurm.BACKEND, "state", state)

    return play


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "slurm-12.out"
    file.write_text("epoch 1\n")
    return file


def test_a_job_from_its_start_to_its_end(states, output, capsys):
    waiting, running = JobState(phase="waiting", text="waits: Resources"), RUNNING
    states(
        [
            JobState(phase="waiting", text="waits"),
            waiting,
            waiting,
            running,
            JobState(phase="running", text="is suspended"),
            running,
            JobState(phase="waiting", text="waits: BeginTime", restarts=1),
            replace(running, restarts=1),
            JobState(phase="ending", restarts=1),
            replace(DONE, restarts=1),
        ]
    )
    assert job.JobFollower(slurm.BACKEND, "12", output).follow() == 0
    said = capsys.readouterr()
    assert said.out == "epoch 1\n"
    assert said.err == (
        "lockstep: job 12 waits\n"
        "lockstep: job 12 waits: Resources\n"
        "lockstep: job 12 runs on n1\n"
        "lockstep: job 12 is suspended\n"
        "lockstep: job 12 runs on n1\n"
        "lockstep: job 12 was put back into the queue\n"
        "lockstep: job 12 waits: BeginTime\n"
        "lockstep: job 12 runs on n1\n"
        "lockstep: job 12 is done\n"
    )


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ('{"status": "preempted", "step": 7}', "preempted, saved after step 7, and put back"),
        ('{"status": "running"}', "put back"),
        ("half a rec", "put back"),
    ],
)
def test_a_job_that_was_preempted(states, output, capsys, record, said):
    (output.parent / "run.json").write_text(record)
    states(
        [
            JobState(phase="ending", restarts=1),
            JobState(phase="waiting", text="waits", restarts=1),
            replace(RUNNING, restarts=1),
            replace(DONE, restarts=1),
        ]
    )
    assert job.JobFollower(slurm.BACKEND, "12", output).follow() == 0
    assert capsys.readouterr().err == (
        f"lockstep: job 12 was {said} into the queue\n"
        "lockstep: job 12 waits\n"
        "lockstep: job 12 runs on n1\n"
        "lockstep: job 12 is done\n"
    )


def test_a_job_that_failed(states, output, capsys):
    states([JobState(phase="ended", text="was stopped", hint="ask for more", exit_code=3)])
    assert job.JobFollower(slurm.BACKEND, "12", output).follow() == 3
    said = "lockstep: job 12 was stopped; output: slurm-12.out\nhint: ask for more\n"
    assert capsys.readouterr().err == said


def test_a_job_that_will_never_start(states, output, capsys):
    stuck = JobState(phase="waiting", text="will not start as it is: held", hint="release it")
    states([stuck, stuck, KeyboardInterrupt()])
    assert job.JobFollower(slurm.BACKEND, "12", output).follow() == 130
    said = "lockstep: job 12 will not start as it is: held\nhint: release it\n\n"
    assert capsys.readouterr().err.startswith(said)


def test_ctrl_c(states, output, capsys):
    states([KeyboardInterrupt()])
    assert job.JobFollower(slurm.BACKEND, "12", output).follow() == 130
    assert capsys.readouterr().err == (
        "\nlockstep: job 12 continues without being followed\n"
        "hint: follow: tail -f slurm-12.out · state: squeue -j 12 · cancel: scancel 12\n"
    )


def test_nobody_reads(states, output, capsys, monkeypatch):
    def closed(*_: object) -> None:
        raise BrokenPipeError

    states([RUNNING])
    monkeypatch.setattr(job.JobFollower, "_show", closed)
    assert job.JobFollower(slurm.BACKEND, "12", output).follow() == 130
    assert "the output is not read any more: job 12 continues" in capsys.readouterr().err


def test_what_arrives_late_is_shown(states, output, capsys, monkeypatch):
    monkeypatch.setattr(job, "_LAST_WORDS", 0.05)
    monkeypatch.setattr(job.time, "sleep", lambda _: output.write_text("epoch 1\nepoch 2\n"))
    states([DONE])
    assert job.JobFollower(slurm.BACKEND, "12", output).follow() == 0
    assert capsys.readouterr().out == "epoch 1\nepoch 2\n"


def test_output_that_the_nodes_wrote_elsewhere(states, output, capsys):
    output.unlink()
    states([DONE])
    assert job.JobFollower(slurm.BACKEND, "12", output).follow() == 0
    assert (
        "slurm-12.out is not there: do the nodes share this directory?" in capsys.readouterr().err
    )


def test_slurm_that_is_away_for_a_while(states, output, capsys):
    away = NoAnswerError("Unable to contact")
    states([away, away, RUNNING, DONE])
    assert job.JobFollower(slurm.BACKEND, "12", output).follow() == 0
    assert capsys.readouterr().err.count("Slurm does not answer (Unable to contact); trying") == 1


def test_slurm_that_stays_away(states, output, monkeypatch):
    monkeypatch.setattr(job, "_PATIENCE", -1.0)
    states([NoAnswerError("Unable to contact")])
    with pytest.raises(
        RunError, match=r"Unable to contact\nhint: job 12 may be running; follow: tail"
    ):
        job.JobFollower(slurm.BACKEND, "12", output).follow()


def test_a_job_that_slurm_has_forgotten(states, output, capsys):
    states([UnknownJobError("12")])
    with pytest.raises(RunError, match="forgotten job 12; expected it to say how it ended"):
        job.JobFollower(slurm.BACKEND, "12", output).follow()
    assert capsys.readouterr().out == "epoch 1\n"
