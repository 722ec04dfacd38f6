"""What Slurm's commands say, and how it is read."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.errors import UsageError
from lockstep.tools.submit import slurm
from lockstep.tools.submit.slurm import JobState

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


def test_a_jobs_state():
    state = slurm.parse(FAILED)
    assert state == JobState(
        state="FAILED",
        reason="NonZeroExitCode",
        nodes="n[1-2]",
        restarts=2,
        exit_code=3,
        time_limit="00:05:00",
    )
    assert (state.waits, state.ended) == (False, True)


@pytest.mark.parametrize(
    ("state", "waits", "ended"),
    [
        ("PENDING", True, False),
        ("REQUEUE_HOLD", True, False),
        ("RUNNING", False, False),
        ("COMPLETING", False, False),
        ("SUSPENDED", False, False),
        ("COMPLETED", False, True),
        ("OUT_OF_MEMORY", False, True),
        ("SOMETHING_NEW", False, True),
    ],
)
def test_states(state, waits, ended):
    one = JobState(state=state)
    assert (one.waits, one.ended) == (waits, ended)


@pytest.mark.parametrize("text", ["", "nothing", FAILED.replace("3:0", "3"), FAILED[:200]])
def test_a_state_that_is_none(text):
    with pytest.raises(slurm.NoAnswerError, match="scontrol said"):
        slurm.parse(text)


def test_handing_in(programs, monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_CONF", "/etc/other.conf")
    seen = programs / "seen"
    program(programs, "sbatch", f'echo "$@ $SLURM_NTASKS $SLURM_CONF" > {seen}; echo "12;alpha"')
    assert slurm.submit(Path("job.sh")) == slurm.Taken("12", "")
    assert seen.read_text() == "--parsable job.sh  /etc/other.conf\n"


def test_warnings_are_kept(programs):
    program(programs, "sbatch", "echo 'sbatch: warning: small is full' >&2; echo 12")
    assert slurm.submit(Path("job.sh")).warnings == "sbatch: warning: small is full"


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
        slurm.submit(Path("job.sh"))
    assert said in str(caught.value)


def test_no_slurm(programs):
    with pytest.raises(UsageError, match="there is no sbatch on PATH"):
        slurm.submit(Path("job.sh"))
    with pytest.raises(slurm.NoAnswerError, match="No such file"):
        slurm.state("12")


def test_slurm_that_does_not_answer(programs, monkeypatch):
    monkeypatch.setattr(slurm, "_SECONDS", 0.2)
    for name in ("sbatch", "scontrol"):
        program(programs, name, "exec /bin/sleep 60")
    with pytest.raises(UsageError, match=r"no answer within 0\.2 s"):
        slurm.submit(Path("job.sh"))
    with pytest.raises(slurm.NoAnswerError, match=r"no answer within 0\.2 s"):
        slurm.state("12")


def test_jobs_that_slurm_does_not_know(programs):
    program(
        programs, "scontrol", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    )
    with pytest.raises(slurm.UnknownJobError):
        slurm.state("12")
    program(programs, "scontrol", "echo 'scontrol: error: Unable to contact' >&2; exit 1")
    with pytest.raises(slurm.NoAnswerError, match=r"^Unable to contact$"):
        slurm.state("12")
