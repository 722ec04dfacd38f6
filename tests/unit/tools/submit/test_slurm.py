"""What Slurm's commands say, and how it is read."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.tools.submit import backend
from lockstep.tools.submit.backend import JobState, NoAnswerError, Submission, UnknownJobError
from lockstep.tools.submit.backends import slurm

#: Recorded from Slurm 22.05.
FAILED = """\
JobId=4 JobName=JobState=COMPLETED ExitCode=0:0
   UserId=ada(1000) GroupId=ada(1000) MCS_label=N/A
   Priority=4294901756 Nice=0 Account=(null) QOS=(null)
   JobState=FAILED Reason=NonZeroExitCode Dependency=(null)
   Requeue=1 Restarts=2 BatchFlag=1 Reboot=0 ExitCode=3:0
   RunTime=00:00:01 TimeLimit=00:05:00 TimeMin=N/A
   SubmitTime=2026-11-21T04:27:56 EligibleTime=2026-11-21T04:27:56
   ReqNodeList=(null) ExcNodeList=(null)
   NodeList=n[1-2]
   BatchHost=n1
   NumNodes=2 NumCPUs=2 NumTasks=2 CPUs/Task=1 ReqB:S:C:T=0:0:*:*
   Command=/home/ada/job.sh
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory on PATH, for commands made up in a test."""
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def program(directory: Path, name: str, text: str) -> None:
    file = directory / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


def listing(state: str, reason: str = "None", **changes: str) -> str:
    """Return what scontrol prints of a job."""
    fields = {"JobState": state, "Reason": reason, "Restarts": "0", "ExitCode": "0:0"}
    fields |= {"TimeLimit": "00:01:00", "NodeList": "n[1-2]", **changes}
    return "JobId=12 JobName=t\n" + "".join(f" {name}={text}" for name, text in fields.items())


def test_a_jobs_state():
    assert slurm.parse(FAILED, "4") == JobState(
        phase="ended",
        text="failed with exit code 3 (NonZeroExitCode)",
        restarts=2,
        exit_code=3,
        has_run=True,
    )


@pytest.mark.parametrize(
    ("state", "reason", "phase", "text"),
    [
        ("PENDING", "None", "waiting", "waits"),
        ("REQUEUE_HOLD", "Resources", "waiting", "waits: Resources"),
        ("PENDING", "JobHeldUser", "waiting", "will not start as it is: JobHeldUser"),
        ("RUNNING", "None", "running", "runs on n[1-2]"),
        ("SUSPENDED", "None", "running", "is suspended"),
        ("COMPLETING", "None", "ending", ""),
    ],
)
def test_states(state, reason, phase, text):
    found = slurm.parse(listing(state, reason), "12")
    assert (found.phase, found.text) == (phase, text)
    assert bool(found.hint) is ("as it is" in text)


@pytest.mark.parametrize(
    ("state", "exit_code", "code", "said"),
    [
        ("COMPLETED", "0:0", 0, "is done"),
        ("FAILED", "3:0", 3, "failed with exit code 3 (X)"),
        ("FAILED", "0:9", 137, "was ended by signal 9"),
        ("CANCELLED", "0:0", 1, "was cancelled"),
        ("CANCELLED", "0:15", 143, "was cancelled"),
        ("TIMEOUT", "0:0", 1, "was stopped at its time limit of 00:01:00"),
        ("OUT_OF_MEMORY", "0:125", 253, "was killed: it used more memory than it asked for"),
        ("NODE_FAIL", "0:0", 1, "ended because a node failed (n[1-2])"),
        ("REVOKED", "0:0", 1, "ended as REVOKED (X)"),
    ],
)
def test_ends(state, exit_code, code, said):
    found = slurm.parse(listing(state, "X", ExitCode=exit_code), "12")
    assert (found.phase, found.exit_code, found.text) == ("ended", code, said)
    assert bool(found.hint) is (state in ("TIMEOUT", "OUT_OF_MEMORY"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("qos=high",), "--sbatch is 'qos=high'; expected an option of sbatch"),
        (("",), "--sbatch is ''"),
        (("--array=1-3",), "--sbatch=--array=1-3 cannot be combined"),
        (("-a1-3",), "--sbatch=-a1-3 cannot"),
        (("-o", "--qos=high"), "--sbatch=-o cannot"),
        (("--output=x",), "hint: --run-dir DIR"),
        (("--wrap=ls",), "hint: name a script of Python"),
        (("--signal=B:TERM",), "hint: --save-before SECONDS"),
    ],
)
def test_options_that_cannot_be_combined(options, said):
    given = argparse.Namespace(partition=None, account=None, sbatch=list(options))
    with pytest.raises(UsageError) as caught:
        slurm.BACKEND.options(given)
    assert said in str(caught.value)


@pytest.mark.parametrize("text", ["", "nothing", FAILED.replace("3:0", "3"), FAILED[:200]])
def test_a_state_that_is_none(text):
    with pytest.raises(NoAnswerError, match="scontrol said"):
        slurm.parse(text, "4")


def test_handing_in(programs, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_CONF", "/etc/other.conf")
    seen = programs / "seen"
    program(programs, "sbatch", f'echo "$@ $SLURM_NTASKS $SLURM_CONF" > {seen}; echo "12;alpha"')
    assert slurm.BACKEND.submit(Path("job.sh")) == Submission("12")
    assert seen.read_text() == "--parsable job.sh  /etc/other.conf\n"


def test_warnings_are_kept(programs):
    program(programs, "sbatch", "echo 'sbatch: warning: small is full' >&2; echo 12")
    assert slurm.BACKEND.submit(Path("job.sh")).warnings == "sbatch: warning: small is full"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("echo 'sbatch: error: one' >&2; echo 'sbatch: error: two' >&2; exit 1", "job: one; two"),
        ("exit 1", "job: it gives no reason"),
    ],
)
def test_refusals(programs, text, said):
    program(programs, "sbatch", text)
    with pytest.raises(UsageError) as caught:
        slurm.BACKEND.submit(Path("job.sh"))
    assert said in str(caught.value)


def test_no_slurm(programs):
    with pytest.raises(UsageError, match="there is no sbatch on PATH"):
        slurm.BACKEND.submit(Path("job.sh"))
    with pytest.raises(NoAnswerError, match="No such file"):
        slurm.BACKEND.state("12")


def test_slurm_that_does_not_answer(programs, monkeypatch):
    monkeypatch.setattr(backend, "_SECONDS", 0.2)
    for name in ("sbatch", "scontrol"):
        program(programs, name, "exec /bin/sleep 60")
    with pytest.raises(UsageError, match=r"no answer within 0\.2 s"):
        slurm.BACKEND.submit(Path("job.sh"))
    with pytest.raises(NoAnswerError, match=r"no answer within 0\.2 s"):
        slurm.BACKEND.state("12")


def test_jobs_that_slurm_does_not_know(programs):
    program(
        programs, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    )
    with pytest.raises(UnknownJobError):
        slurm.BACKEND.state("12")
    program(programs, "scontrol", "echo 'scontrol: error: Unable to contact' >&2; exit 1")
    with pytest.raises(NoAnswerError, match=r"^Unable to contact$"):
        slurm.BACKEND.state("12")
