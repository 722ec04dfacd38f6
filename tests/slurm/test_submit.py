"""`lockstep submit` on a real Slurm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import Lockstep
from tests.distributed.small import SCRIPT, digest_of
from tests.slurm.conftest import Slurm

pytestmark = pytest.mark.ranks(2)


def read_until(process: subprocess.Popen[str], pattern: str) -> re.Match[str]:
    """Read what a command says on standard error, and no more, until a line matches."""
    assert process.stderr is not None
    said = b""
    while byte := os.read(process.stderr.fileno(), 1):
        said += byte
        if byte == b"\n" and (found := re.search(pattern, said.decode().splitlines()[-1])):
            return found
    raise AssertionError(f"no {pattern!r} in {said.decode()}")


def runs(directory: Path) -> list[Path]:
    return sorted(directory.glob("runs/*/*"))


def test_two_nodes_give_the_digest_of_one_process(
    slurm: Slurm, lockstep: Lockstep, digest_of_python: str
) -> None:
    script = lockstep.script(SCRIPT)
    done = lockstep("submit", "--nodes=2", "-n", "2", "--time=2", script, timeout=90)
    assert done.code == 0, done.err
    job = re.findall(
        r"^lockstep: job (\d+) submitted: runs/train/\S+/job.sh$", done.err, re.MULTILINE
    )[0]
    assert f"lockstep: job {job} runs on n[1-2]\n" in done.err
    assert done.err.endswith(f"lockstep: job {job} is done\n")
    (run_dir,) = runs(lockstep.directory)
    assert (run_dir / f"slurm-{job}.out").read_text() == done.out
    assert {"job.sh", "run.json", "logs"} <= {path.name for path in run_dir.iterdir()}
    assert digest_of(done.out) == digest_of_python
    again = lockstep("submit", "--logs", job)
    assert (again.code, again.out) == (0, done.out)


def test_a_failure_has_its_verdict_and_its_exit_code(slurm: Slurm, lockstep: Lockstep) -> None:
    # Directories and arguments that a careless quoting would break.
    lockstep.directory.joinpath("a dir").mkdir()
    lockstep.script("import sys; print(sys.argv[1:]); raise SystemExit(3)", "a dir/it's.py")
    words = ["--job-name", 'a "b" #c', "--run-dir", "my % run", "a dir/it's.py", "$HOME", "x y", ""]
    done = lockstep("submit", *words)
    assert done.code == 1, done.err
    assert "['$HOME', 'x y', '']" in done.out
    assert "lockstep: rank 0 of 1 failed" in done.out
    assert re.search(
        r"job \d+ failed with exit code 1 \(NonZeroExitCode\); output: my % run/", done.err
    )
    assert "Traceback" not in done.err


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--partition=nowhere", "Invalid partition name specified"),
        ("--time=soon", "Invalid --time specification"),
        ("--sbatch=--no-such-option", "unrecognized option '--no-such-option'"),
    ],
)
def test_what_sbatch_refuses(slurm: Slurm, lockstep: Lockstep, option: str, said: str) -> None:
    done = lockstep("submit", option, lockstep.script(""))
    assert done.code == 2
    assert done.err.startswith("lockstep: error: sbatch did not take the job: ")
    assert said in done.err
    assert [path.name for path in lockstep.directory.iterdir()] == ["train.py"]


def test_ctrl_c_leaves_the_job_to_itself(slurm: Slurm, lockstep: Lockstep) -> None:
    process = lockstep.start("submit", "--sbatch=--hold", lockstep.script(""))
    job = read_until(process, r"job (\d+) will not start as it is: JobHeldUser$")[1]
    process.send_signal(signal.SIGINT)
    done = lockstep.finish(process)
    assert done.code == 130
    assert f"job {job} continues without being followed" in done.err
    assert f"squeue -j {job} · cancel: scancel {job}\n" in done.err
    assert slurm("squeue", "--noheader", "--format=%A").out.split() == [job]


def test_a_job_that_is_cancelled(slurm: Slurm, lockstep: Lockstep) -> None:
    process = lockstep.start("submit", "--sbatch=--hold", lockstep.script(""))
    job = read_until(process, r"job (\d+) will not start as it is: JobHeldUser")[1]
    assert slurm("scancel", job).code == 0
    done = lockstep.finish(process)
    assert done.code == 1
    assert done.err.endswith(f"lockstep: job {job} was cancelled\n")


@pytest.mark.wide
def test_a_job_that_is_put_back_into_the_queue(slurm: Slurm, lockstep: Lockstep) -> None:
    lockstep.script(
        "import os, pathlib, time\n"
        "first = os.environ.get('SLURM_RESTART_COUNT', '0') == '0'\n"
        "print('first' if first else 'second', flush=True)\n"
        "pathlib.Path('started').touch()\n"
        "time.sleep(60 if first else 0)\n"
    )
    process = lockstep.start("submit", "train.py")
    job = read_until(process, r"job (\d+) runs on n1$")[1]
    started, deadline = lockstep.directory / "started", time.monotonic() + 30
    while not started.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert slurm("scontrol", "requeue", job).code == 0
    slurm("scontrol", "update", f"JobId={job}", "StartTime=now")
    done = lockstep.finish(process)
    assert done.code == 0, done.err
    assert re.findall(r"^(first|second)$", done.out, re.MULTILINE) == ["first", "second"]
    assert f"lockstep: job {job} was put back into the queue\n" in done.err


def test_a_job_that_nobody_follows(slurm: Slurm, lockstep: Lockstep) -> None:
    done = lockstep("submit", "--no-follow", "--sbatch=--hold", lockstep.script(""))
    assert done.code == 0, done.err
    assert slurm("squeue", "--noheader", "--format=%A").out == done.out
    job = done.out.strip()
    told = lockstep("submit", "--status", job)
    assert told.code == 0
    assert told.err.startswith(f"lockstep: job {job} will not start as it is: JobHeldUser\nhint: ")
    assert lockstep("submit", "--cancel", job).err == f"lockstep: job {job} is cancelled\n"
    told = lockstep("submit", "--status", job)
    assert (told.code, told.err) == (1, f"lockstep: job {job} was cancelled\n")
    told = lockstep("submit", "--status", "999999")
    assert told.code == 1
    assert "Slurm knows no job 999999\nhint: squeue --me lists jobs" in told.err
