"""Interface of job schedulers such as Slurm; each module of `backends/` implements the interface."""

from __future__ import annotations

import argparse
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lockstep.tools.submit.request import JobRequest

#: Seconds that a program of a job scheduler may take.
_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """The state of a submitted job: its phase, a description and advice, its restarts and exit code."""

    phase: Literal["waiting", "running", "ending", "ended"]
    text: str = ""  # a description, such as `runs on node1`, or how the job ended
    hint: str = ""  # advice for the user
    restarts: int = 0  # number of times that the job was requeued
    exit_code: int = 0
    has_run: bool = False  # whether the job was ever given nodes


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that a backend has accepted: its id, or the output of `kubectl`, and warnings."""

    job: str
    warnings: str = ""


class UnknownJobError(Exception):
    """The job scheduler has no record of the job: it never existed, or the record was deleted."""


class NoAnswerError(Exception):
    """The job scheduler does not answer at present."""


def call(*words: str, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program of a job scheduler, such as `sbatch`; return its exit code and its output as text.

    `words` is the command line. `environ` has the environment variables of the program, by default those
    of this process.

    Raises:
        NoAnswerError: if the program cannot be started, or takes more than a minute.
    """
    try:
        return subprocess.run(
            words,
            env=environ,
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


class Backend(ABC):
    """Interface of a job scheduler, such as Slurm, for `lockstep submit`."""

    title: str  # in messages
    program: str  # the command that takes jobs, in messages
    #: whether run directories lie in the cluster, so that this machine neither writes nor reads them
    is_remote = False

    @abstractmethod
    def add_flags(self, group: argparse._ActionsContainer) -> None:
        """Add the command-line flags of this backend to `group`."""

    @abstractmethod
    def options(self, options: argparse.Namespace) -> Any:
        """Return the options of this backend, taken from the parsed command-line flags `options`.

        Raises:
            UsageError: if an option conflicts with those that Lockstep sets.
        """

    def name(self, text: str, *, chosen: bool) -> str:
        """Return the name under which a job is submitted: `text`, or a name made from it.

        `chosen`: whether the user gave `text`. Otherwise it is the script's name, and may be changed.

        Raises:
            UsageError: if the job scheduler does not accept a name that the user chose.
        """
        del chosen
        return text

    def job_id(self, name: str, options: argparse.Namespace) -> str:
        """Return the id of the job with the name `name`; `options` are the parsed command-line flags."""
        del options
        return name

    def default_run_dir(self, request: JobRequest, run: str) -> Path:
        """Return the default run directory of a job; `run` is the name of the run."""
        del request
        return (Path("runs") / run / "TIME").absolute()

    @abstractmethod
    def script(self, request: JobRequest, run_dir: Path) -> str:
        """Return the job script, which starts `lockstep run --run-dir RUN_DIR` on each node.

        Raises:
            UsageError: if a name cannot be written in a job script.
        """

    @abstractmethod
    def submit(self, script: Path) -> Submission:
        """Submit the job script in the file `script`; return the job's id, and warnings.

        Raises:
            UsageError: if the backend cannot be reached, or refuses the job.
        """

    @abstractmethod
    def state(self, job: str) -> JobState:
        """Return the state of the job with the id `job`.

        Raises:
            UnknownJobError: if the job does not exist.
            NoAnswerError: if the backend does not answer.
        """

    @abstractmethod
    def output(self, run_dir: Path, job: str) -> Path:
        """Return the path of the file to which the job with the id `job` writes its output."""

    @abstractmethod
    def logs(self, job: str) -> int:
        """Print the output of the job with the id `job` until its end; return an exit code.

        Raises:
            UnknownJobError: if the job does not exist.
            NoAnswerError: if the backend does not answer.
        """

    @abstractmethod
    def cancel(self, job: str) -> str:
        """Cancel the job with the id `job`; return the job scheduler's message.

        Raises:
            UnknownJobError: if the job does not exist.
            NoAnswerError: if the backend does not answer.
        """

    @abstractmethod
    def commands(self, job: str = "") -> str:
        """Return a text with shell commands that show and cancel a job, or list jobs if `job` is empty."""
