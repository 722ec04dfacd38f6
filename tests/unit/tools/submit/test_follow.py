"""Following a job, as a user sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from lockstep.errors import RunError
from lockstep.tools.submit import follow, slurm
from lockstep.tools.submit.slurm import JobState

Step = JobState | Exception | BaseException


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> Callable[[Iterable[Step]], None]:
    """Let Slurm answer one thing after the other, without pauses."""
    monkeypatch.setattr(follow, "_ASK", (0.0, 0.0))
    monkeypatch.setattr(follow, "_LAST_WORDS", 0.0)

    def play(steps: Iterable[Step]) -> None:
        answers = iter(steps)

        def state(job: str) -> JobState:
            assert job == "12"
            answer = next(answers)
            if isinstance(answer, JobState):
                return answer
            raise answer

        monkeypatch.setattr(slurm, "state", state)

    return play


@pytest.fixture
def output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "slurm-12.out"
    file.write_text("epoch 1\n")
    return file


def test_a_job_from_its_start_to_its_end(states, output, capsys):
    running = JobState(state="RUNNING", nodes="n[1-2]")
    states(
        [
            JobState(state="PENDING"),
            JobState(state="PENDING", reason="Resources"),
            JobState(state="PENDING", reason="Resources"),
            running,
            JobState(state="SUSPENDED", nodes="n[1-2]"),
            running,
            JobState(state="PENDING", reason="BeginTime", restarts=1),
            JobState(state="RUNNING", nodes="n1", restarts=1),
            JobState(state="COMPLETING", nodes="n1", restarts=1),
            JobState(state="COMPLETED", nodes="n1", restarts=1),
        ]
    )
    assert follow.Follower("12", output).follow() == 0
    said = capsys.readouterr()
    assert said.out == "epoch 1\n"
    assert said.err == (
        "lockstep: job 12 waits\n"
        "lockstep: job 12 waits: Resources\n"
        "lockstep: job 12 runs on n[1-2]\n"
        "lockstep: job 12 is suspended\n"
        "lockstep: job 12 runs on n[1-2]\n"
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
            JobState(state="COMPLETING", nodes="n1", restarts=1),
            JobState(state="PENDING", restarts=1),
            JobState(state="RUNNING", nodes="n1", restarts=1),
            JobState(state="COMPLETED", nodes="n1", restarts=1),
        ]
    )
    assert follow.Follower("12", output).follow() == 0
    assert capsys.readouterr().err == (
        f"lockstep: job 12 was {said} into the queue\n"
        "lockstep: job 12 waits\n"
        "lockstep: job 12 runs on n1\n"
        "lockstep: job 12 is done\n"
    )


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        (
            JobState(state="FAILED", exit_code=3, reason="X"),
            3,
            "failed with exit code 3 (X); output: ",
        ),
        (JobState(state="FAILED", signal=9), 137, "was ended by signal 9"),
        (JobState(state="CANCELLED"), 1, "was cancelled"),
        (JobState(state="CANCELLED", signal=15), 143, "was cancelled"),
        (JobState(state="TIMEOUT", time_limit="00:01:00"), 1, "time limit of 00:01:00"),
        (JobState(state="TIMEOUT"), 1, "hint: --time T asks for more"),
        (JobState(state="OUT_OF_MEMORY", signal=125), 253, "hint: --sbatch=--mem=SIZE"),
        (JobState(state="NODE_FAIL", nodes="n2"), 1, "ended because a node failed (n2)"),
        (JobState(state="PREEMPTED"), 1, "was preempted by another job"),
        (JobState(state="DEADLINE"), 1, "was stopped at its deadline"),
        (JobState(state="BOOT_FAIL"), 1, "could not start: a node did not boot"),
        (JobState(state="REVOKED", reason="Y"), 1, "ended as REVOKED (Y)"),
    ],
)
def test_ends(states, output, capsys, end, code, said):
    states([end])
    assert follow.Follower("12", output).follow() == code
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("reason", ["PartitionTimeLimit", "JobHeldUser"])
def test_a_job_that_will_never_start(states, output, capsys, reason):
    states([JobState(state="PENDING", reason=reason), KeyboardInterrupt()])
    assert follow.Follower("12", output).follow() == 130
    assert f"job 12 will not start as it is: {reason}\nhint: " in capsys.readouterr().err


def test_ctrl_c(states, output, capsys):
    states([KeyboardInterrupt()])
    assert follow.Follower("12", output).follow() == 130
    assert capsys.readouterr().err == (
        "\nlockstep: job 12 continues without being followed\n"
        "hint: follow: tail -f slurm-12.out · state: squeue -j 12 · cancel: scancel 12\n"
    )


def test_nobody_reads(states, output, capsys, monkeypatch):
    def closed(*_: object) -> None:
        raise BrokenPipeError

    states([JobState(state="RUNNING")])
    monkeypatch.setattr(follow.Follower, "_show", closed)
    assert follow.Follower("12", output).follow() == 130
    assert "the output is not read any more: job 12 continues" in capsys.readouterr().err


def test_what_arrives_late_is_shown(states, output, capsys, monkeypatch):
    monkeypatch.setattr(follow, "_LAST_WORDS", 0.05)
    monkeypatch.setattr(follow.time, "sleep", lambda _: output.write_text("epoch 1\nepoch 2\n"))
    states([JobState(state="COMPLETED")])
    assert follow.Follower("12", output).follow() == 0
    assert capsys.readouterr().out == "epoch 1\nepoch 2\n"


def test_output_that_the_nodes_wrote_elsewhere(states, output, capsys):
    output.unlink()
    states([JobState(state="COMPLETED", nodes="n1")])
    assert follow.Follower("12", output).follow() == 0
    assert (
        "slurm-12.out is not there: do the nodes share this directory?" in capsys.readouterr().err
    )


def test_slurm_that_is_away_for_a_while(states, output, capsys):
    away = slurm.NoAnswerError("Unable to contact")
    states([away, away, JobState(state="RUNNING", nodes="n1"), JobState(state="COMPLETED")])
    assert follow.Follower("12", output).follow() == 0
    assert capsys.readouterr().err.count("Slurm does not answer (Unable to contact); trying") == 1


def test_slurm_that_stays_away(states, output, monkeypatch):
    monkeypatch.setattr(follow, "_PATIENCE", -1.0)
    states([slurm.NoAnswerError("Unable to contact")])
    with pytest.raises(
        RunError, match=r"Unable to contact\nhint: job 12 may be running; follow: tail"
    ):
        follow.Follower("12", output).follow()


def test_a_job_that_slurm_has_forgotten(states, output, capsys):
    states([slurm.UnknownJobError("12")])
    with pytest.raises(RunError, match="forgotten job 12, so that it is not known how it ended"):
        follow.Follower("12", output).follow()
    assert capsys.readouterr().out == "epoch 1\n"
