"""Calls of Slurm's commands: submission and state of a job."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import UsageError

_SECONDS = 60.0
_PENDING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT")
_RUNNING = ("RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING")
#: Variables of Slurm that concern the commands, not the job from which they may be called.
_KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT", "SLURM_TIME_FORMAT")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """A job as `scontrol show job` describes it."""

    state: str  # such as `RUNNING`
    reason: str = "None"  # why it waits, or how it ended
    nodes: str = ""  # written short
    restarts: int = 0  # how many times it was requeued
    exit_code: int = 0
    signal: int = 0  # that ended the job script; 0 for none
    time_limit: str = ""

    @property
    def waits(self) -> bool:
        """Whether it has yet to start, or to start again."""
        return self.state in _PENDING

    @property
    def ran(self) -> bool:
        """Whether it has had nodes."""
        return self.nodes not in ("", "(null)")

    @property
    def ended(self) -> bool:
        """Whether it is over."""
        return self.state not in _PENDING + _RUNNING


@dataclass(frozen=True, slots=True)
class Taken:
    """A job that sbatch took: its number, and what sbatch had to say about it."""

    job: str
    warnings: str


class UnknownJobError(Exception):
    """Slurm knows no such job, or has forgotten it."""


class NoAnswerError(Exception):
    """Slurm does not answer now."""


def submit(script: Path) -> Taken:
    """Hand `script` to sbatch.

    Raises:
        UsageError: if there is no sbatch, or it refuses the job.
    """
    program = shutil.which("sbatch")
    if program is None:
        raise UsageError(
            "there is no sbatch on PATH; expected the commands of Slurm",
            hint="use a machine from which the cluster takes jobs; --dry-run prints the job script",
        )
    try:
        done = _call(program, "--parsable", str(script))
    except NoAnswerError as error:
        raise UsageError(f"sbatch did not take the job: {error}") from None
    if done.returncode:
        raise UsageError(
            f"sbatch did not take the job: {_words(done.stderr) or 'it gives no reason'}",
            hint="sinfo lists the partitions, sacctmgr show associations the accounts",
        )
    return Taken(done.stdout.strip().partition(";")[0], _words(done.stderr))


def state(job: str) -> JobState:
    """Return the state of job number `job`.

    Raises:
        UnknownJobError: if Slurm does not know it.
        NoAnswerError: if Slurm does not answer.
    """
    done = _call(shutil.which("scontrol") or "scontrol", "show", "job", job)
    if "Invalid job id" in done.stderr:
        raise UnknownJobError(job)
    if done.returncode:
        raise NoAnswerError(_words(done.stderr))
    return parse(done.stdout)


def parse(text: str) -> JobState:
    """Read what `scontrol show job` prints of one job.

    Raises:
        NoAnswerError: if it is not that.
    """
    try:
        code, signal = _field(text, "ExitCode").split(":")
        return JobState(
            state=_field(text, "JobState"),
            reason=_field(text, "Reason"),
            nodes=_field(text, "NodeList"),
            restarts=int(_field(text, "Restarts")),
            exit_code=int(code),
            signal=int(signal),
            time_limit=_field(text, "TimeLimit"),
        )
    except ValueError:
        raise NoAnswerError(f"scontrol said {text[:200]!r}") from None


def _field(text: str, name: str) -> str:
    # The job's name, which may hold anything, is on the first line.
    found = re.search(rf"[ ]{name}=(\S*)", text.partition("\n")[2])
    if found is None:
        raise ValueError(name)
    return found[1]


def _call(*words: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            words,
            env=_environ(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise NoAnswerError(f"no answer within {_SECONDS:g} s") from None
    except OSError as error:
        raise NoAnswerError(f"{words[0]}: {error.strerror}") from None


def _environ() -> dict[str, str]:
    """Return the environment without what a surrounding job says of itself: srun would believe it."""
    kept = {name for name in os.environ if not name.startswith("SLURM") or name in _KEPT}
    return {name: os.environ[name] for name in kept}


def _words(text: str) -> str:
    """Return what a command complained of, in one line."""
    lines = (re.sub(r"^\w+: (error|fatal): ", "", line.strip()) for line in text.splitlines())
    return "; ".join(line for line in lines if line)
