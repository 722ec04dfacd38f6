"""Follow a job: the reason for which it waits, its output, its end."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from pathlib import Path

from lockstep.errors import RunDirectoryError, RunError
from lockstep.state.files import run_file
from lockstep.state.files.directory import short
from lockstep.tools.submit import slurm
from lockstep.tools.submit.slurm import JobState
from lockstep.tools.submit.terminal import say

#: Seconds between two looks at the output, and between two questions to Slurm: at first, and at most.
_LOOK = 0.1
_ASK = (0.25, 3.0)
#: Seconds without an answer from Slurm after which it is given up.
_PATIENCE = 300.0
#: Seconds in which the last words of a job may still arrive from its node.
_LAST_WORDS = 0.5
#: Reasons that do not pass by themselves, and what to do.
_STUCK = {
    "BadConstraints": "ask for what some node has",
    "JobHeldAdmin": "an administrator holds it: ask why",
    "JobHeldUser": "scontrol release lets it go",
    "PartitionNodeLimit": "ask for fewer --nodes",
    "PartitionTimeLimit": "ask for less --time",
}
_DETACHED = 130
_HINTS = {
    "TIMEOUT": "--time T asks for more",
    "OUT_OF_MEMORY": "--sbatch=--mem=SIZE asks for more",
}


class Follower:
    """Shows one job to its end.

    Args:
        job: its number.
        output: the file it prints to.
    """

    def __init__(self, job: str, output: Path) -> None:
        self._job = job
        self._output = output
        self._shown = 0
        self._before: JobState | None = None
        self._restarts = 0
        self._pause = _ASK[0]
        self._silent_since: float | None = None

    def follow(self) -> int:
        """Show the job's states and output; return its exit code.

        Ctrl-C, or a reader of the output that has left, ends the showing and not the job.

        Raises:
            RunError: if Slurm has forgotten the job, or does not answer any more.
        """
        try:
            return self._to_the_end()
        except KeyboardInterrupt:
            return self._detach("")
        except BrokenPipeError:
            return self._detach("the output is not read any more: ")

    def _to_the_end(self) -> int:
        while True:
            now = self._ask()
            if now is not None:
                self._tell(now)
                if now.ended:
                    self._show_for(_LAST_WORDS)
                    return self._end(now)
            self._show_for(self._pause)
            self._pause = min(1.5 * self._pause, _ASK[1])

    def _ask(self) -> JobState | None:
        try:
            now = slurm.state(self._job)
        except slurm.UnknownJobError:
            self._show()
            raise RunError(
                f"Slurm has forgotten job {self._job}, so that it is not known how it ended",
                hint=f"its output: {short(self._output)}",
            ) from None
        except slurm.NoAnswerError as error:
            self._wait_for_slurm(str(error))
            return None
        self._silent_since = None
        return now

    def _wait_for_slurm(self, why: str) -> None:
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
            say(f"lockstep: Slurm does not answer ({why}); trying again")
        if now - self._silent_since > _PATIENCE:
            raise RunError(
                f"Slurm has not answered for {_PATIENCE:g} s: {why}",
                hint=f"job {self._job} may be running; {self._ways()}",
            )

    def _tell(self, now: JobState) -> None:
        before, self._before = self._before, now
        seen = (now.state, now.reason, now.restarts)
        if before is not None and seen == (before.state, before.reason, before.restarts):
            return
        self._pause = _ASK[0]
        # While it completes, its run may still be saving its state.
        if now.restarts > self._restarts and now.state != "COMPLETING":
            self._restarts = now.restarts
            say(f"lockstep: job {self._job} was {self._saved()}put back into the queue")
        if now.waits:
            self._tell_why(now.reason)
        elif now.state == "RUNNING" and (before is None or before.state != "RUNNING"):
            say(f"lockstep: job {self._job} runs on {now.nodes}")
        elif not now.ended and now.state != "COMPLETING":
            say(f"lockstep: job {self._job} is {now.state.lower()}")

    def _saved(self) -> str:
        """Return what became of its run, as the run itself has written."""
        with contextlib.suppress(RunDirectoryError):
            recorded = run_file.read(self._output.parent) or {}
            if recorded.get("status") == "preempted":
                return f"preempted, saved after step {recorded.get('step')}, and "
        return ""

    def _tell_why(self, reason: str) -> None:
        if reason in _STUCK:
            say(f"lockstep: job {self._job} will not start as it is: {reason}")
            say(f"hint: {_STUCK[reason]}, or scancel {self._job}")
        else:
            say(f"lockstep: job {self._job} waits{'' if reason == 'None' else f': {reason}'}")

    def _show_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._show()
        while time.monotonic() < deadline:
            time.sleep(min(_LOOK, seconds))
            self._show()

    def _show(self) -> None:
        # Opened each time: that is when a network file system looks for news.
        try:
            with self._output.open("rb") as file:
                file.seek(self._shown)
                while chunk := file.read(1 << 20):
                    sys.stdout.buffer.write(chunk)
                    self._shown += len(chunk)
        except FileNotFoundError:
            return
        sys.stdout.flush()

    def _end(self, end: JobState) -> int:
        if end.ran and not self._output.exists():
            say(f"lockstep: {short(self._output)} is not there: do the nodes share this directory?")
        if end.state == "COMPLETED":
            say(f"lockstep: job {self._job} is done")
            return 0
        where = f"; output: {short(self._output)}" if self._output.exists() else ""
        say(f"lockstep: job {self._job} {_how(end)}{where}")
        if end.state in _HINTS:
            say(f"hint: {_HINTS[end.state]}")
        return _code(end)

    def _detach(self, why: str) -> int:
        say(f"\nlockstep: {why}job {self._job} continues without being followed")
        say(f"hint: {self._ways()}")
        return _DETACHED

    def _ways(self) -> str:
        file = shlex.quote(str(short(self._output)))
        return (
            f"follow: tail -f {file} · state: squeue -j {self._job} · cancel: scancel {self._job}"
        )


def _how(end: JobState) -> str:
    if end.state == "FAILED" and end.signal:
        return f"was ended by signal {end.signal}"
    if end.state == "FAILED":
        return f"failed with exit code {end.exit_code} ({end.reason})"
    return {
        "CANCELLED": "was cancelled",
        "TIMEOUT": f"was stopped at its time limit of {end.time_limit}",
        "OUT_OF_MEMORY": "was killed: it used more memory than it asked for",
        "NODE_FAIL": f"ended because a node failed ({end.nodes})",
        "PREEMPTED": "was preempted by another job",
        "DEADLINE": "was stopped at its deadline",
        "BOOT_FAIL": "could not start: a node did not boot",
    }.get(end.state, f"ended as {end.state} ({end.reason})")


def _code(end: JobState) -> int:
    """Return the job script's exit code, as a shell would."""
    return end.exit_code or (128 + end.signal if end.signal else 1)
