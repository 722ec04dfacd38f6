"""`Backend`: the interface of a system that runs jobs, such as Slurm; `backends/` has one file for each."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.tools.submit.request import JobRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """The state of a job."""

    phase: Literal["waiting", "running", "ending", "ended"]
    text: str = ""  # what the job does, such as `runs on node1`, or how it ended
    hint: str = ""  # what the user may do about it
    restarts: int = 0  # how many times it was requeued
    exit_code: int = 0
    has_run: bool = False  # whether it has had nodes


@dataclass(frozen=True, slots=True)
class Submission:
    """A job that a backend accepted: its id, and the warnings about it."""

    job: str
    warnings: str = ""


class UnknownJobError(Exception):
    """The backend knows no such job, or has forgotten it."""


class NoAnswerError(Exception):
    """The backend does not answer now."""


class Backend(ABC):
    """A system that runs jobs."""

    title: str  # in messages
    program: str  # the command that takes jobs, in messages

    @abstractmethod
    def add_flags(self, group: argparse._ActionsContainer) -> None:
        """Add the flags that only this backend has to those of a job."""

    @abstractmethod
    def options(self, options: argparse.Namespace) -> tuple[str, ...]:
        """Return what these flags ask for, as `JobRequest.options`.

        Raises:
            UsageError: if that cannot be combined with what Lockstep asks for.
        """

    @abstractmethod
    def script(self, request: JobRequest, run_dir: Path) -> str:
        """Return the job script, which starts `lockstep run --run-dir RUN_DIR` on each node.

        Raises:
            UsageError: if a name cannot stand in it.
        """

    @abstractmethod
    def submit(self, script: Path) -> Submission:
        """Submit a job script.

        Raises:
            UsageError: if the backend cannot be reached, or refuses the job.
        """

    @abstractmethod
    def state(self, job: str) -> JobState:
        """Return the state of a job.

        Raises:
            UnknownJobError: if there is no such job.
            NoAnswerError: if the backend does not answer.
        """

    @abstractmethod
    def output(self, run_dir: Path, job: str) -> Path:
        """Return the file that takes the output of a job."""

    @abstractmethod
    def commands(self, job: str = "") -> str:
        """Return the commands that show and cancel a job; without one, that lists the user's jobs."""
