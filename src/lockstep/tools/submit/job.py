"""Write a job's script to its run directory, submit it, and follow the job to its end."""

from __future__ import annotations

import contextlib
import shlex
import sys
import tempfile
import time
from pathlib import Path

from lockstep.errors import RunDirectoryError, RunError, UsageError
from lockstep.state.files import directory, run_file
from lockstep.state.files.directory import short
from lockstep.tools.submit.backend import (
    Backend,
    JobState,
    NoAnswerError,
    Submission,
    UnknownJobError,
)
from lockstep.tools.submit.request import JobRequest

#: Seconds between two reads of the output.
_LOOK = 0.1
#: Seconds between two queries of the job's state, at first and at most.
_ASK = (0.25, 3.0)
#: Seconds without an answer of the backend after which following ends.
_PATIENCE = 300.0
#: Seconds after a job's end in which its last output may still arrive.
_LAST_WORDS = 0.5
_DETACHED = 130


def say(text: str) -> None:
    """Print the message `text` of `lockstep submit` to standard error."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the command's own words


def submit(
    backend: Backend, request: JobRequest, run_dir: Path | None, name: str
) -> tuple[str, Path]:
    """Write a job script to the run directory and submit it; return the job's id and its output file.

    Without `run_dir`, a new directory for a run called `name` is made.

    Raises:
        UsageError: if the backend refuses the job; then no files are left.
        RunDirectoryError: if the directory cannot be used.
    """
    existed = run_dir is not None and run_dir.exists()
    path = directory.create(run_dir, name)
    file = path / "job.sh"
    try:
        taken = _submit(backend, file, backend.script(request, path))
    except UsageError:
        if not existed:
            file.unlink(missing_ok=True)
            above = [] if run_dir is not None else [path.parent, path.parent.parent]
            with contextlib.suppress(OSError):  # stops at a directory that is not empty
                for made in (path / "logs", path, *above):
                    made.rmdir()
        raise
    say(f"lockstep: job {taken.job} submitted: {short(file)}")
    output = backend.output(path, taken.job)
    say(f"lockstep: its output: {short(output)}")
    return taken.job, output


def _submit(backend: Backend, file: Path, text: str) -> Submission:
    """Write `text`, a job script, to `file`, submit it, and print the warnings of the backend."""
    try:
        file.write_text(text)
    except OSError as error:
        raise RunDirectoryError(f"{file} cannot be written: {error.strerror}") from None
    try:
        taken = backend.submit(file)
    except KeyboardInterrupt:
        say(
            f"\nlockstep: stopped while {backend.program} was at work; {backend.commands()} shows if there "
            "is a job"
        )
        raise
    if taken.warnings:
        say(f"lockstep: {backend.program} says: {taken.warnings}")
    return taken


def submit_remote(backend: Backend, request: JobRequest, run_dir: Path, job: str) -> None:
    """Submit a job whose run directory is in the cluster, and print commands that show and cancel it.

    `job` is the id of the job.

    Raises:
        UsageError: if the backend refuses the job.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-") as place:
        taken = _submit(backend, Path(place) / "job.yaml", backend.script(request, run_dir))
    say(f"lockstep: {taken.job}")
    say(f"lockstep: {backend.commands(job)}")


def act(backend: Backend, action: str, name: str, job: str) -> int:
    """Carry out an action on a job: print its state or output, or cancel it; return the exit code.

    `action` is `status`, `logs` or `cancel`. `job` is the job's id, `name` its name for messages.

    Raises:
        RunError: if the job does not exist, or the backend does not answer.
    """
    try:
        if action == "logs":
            return backend.logs(job)
        if action == "cancel":
            say(f"lockstep: {backend.cancel(job) or f'job {name} is cancelled'}")
            return 0
        state = backend.state(job)
    except UnknownJobError:
        raise RunError(
            f"{backend.title} knows no job {name}", hint=f"{backend.commands()} lists jobs"
        ) from None
    except NoAnswerError as error:
        raise RunError(f"{backend.title} does not answer: {error}") from None
    say(f"lockstep: job {name} {state.text or 'is ending'}")
    if state.hint:
        say(f"hint: {state.hint}")
    return state.exit_code


class JobFollower:
    """Prints the state changes and the output of a job on a cluster until the job ends."""

    def __init__(self, backend: Backend, job: str, output: Path) -> None:
        self._backend = backend
        self._job = job
        self._output = output
        self._shown = 0  # bytes of the output that have been printed
        self._before: JobState | None = None
        self._restarts = 0
        self._pause = _ASK[0]
        self._silent_since: float | None = None

    def follow(self) -> int:
        """Print state changes and output of the job until its end; return the job's exit code.

        Ctrl-C, or a closed pipe at standard output, ends only the printing: then the job continues, and the
        exit code is 130.

        Raises:
            RunError: if the backend has no record of the job, or does not answer any more.
        """
        try:
            while (end := self._look()) is None:
                self._show_for(self._pause)
                self._pause = min(1.5 * self._pause, _ASK[1])
            self._show_for(_LAST_WORDS)
            return self._end(end)
        except KeyboardInterrupt:
            return self._detach("")
        except BrokenPipeError:
            return self._detach("the output is not read any more: ")

    def _look(self) -> JobState | None:
        """Query the job's state; print it if it has changed, and return it if the job has ended.

        The result is `None` if the job has not ended, or if the job scheduler does not answer for now.

        Raises:
            RunError: if the job scheduler does not know the job any more.
        """
        try:
            now = self._backend.state(self._job)
        except UnknownJobError:
            self._show()
            raise RunError(
                f"{self._backend.title} has forgotten job {self._job}; expected it to say how it ended",
                hint=f"its output: {short(self._output)}",
            ) from None
        except NoAnswerError as error:
            self._wait_for_answer(str(error))
            return None
        self._silent_since = None
        self._report(now)
        return now if now.phase == "ended" else None

    def _wait_for_answer(self, why: str) -> None:
        now = time.monotonic()
        if self._silent_since is None:
            self._silent_since = now
            say(f"lockstep: {self._backend.title} does not answer ({why}); trying again")
        if now - self._silent_since > _PATIENCE:
            raise RunError(
                f"{self._backend.title} has not answered for {_PATIENCE:g} s: {why}",
                hint=f"job {self._job} may be running; {self._ways()}",
            )

    def _report(self, now: JobState) -> None:
        before, self._before = self._before, now
        if now == before:
            return
        self._pause = _ASK[0]
        # While the job is ending, its run may still be saving its state.
        if now.restarts > self._restarts and now.phase != "ending":
            self._restarts = now.restarts
            say(f"lockstep: job {self._job} was {self._saved()}put back into the queue")
        if now.phase != "ended" and now.text and (before is None or now.text != before.text):
            say(f"lockstep: job {self._job} {now.text}")
            if now.hint:
                say(f"hint: {now.hint}")

    def _saved(self) -> str:
        """Return `preempted, saved after step N, and ` for a message; "" if the run is not preempted."""
        with contextlib.suppress(RunDirectoryError):
            recorded = run_file.read(self._output.parent) or {}
            if recorded.get("status") == "preempted":
                return f"preempted, saved after step {recorded.get('step')}, and "
        return ""

    def _show_for(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._show()
        while time.monotonic() < deadline:
            time.sleep(min(_LOOK, seconds))
            self._show()

    def _show(self) -> None:
        # The file is opened each time: only then a network file system updates it.
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
        exists = self._output.exists()
        if end.has_run and not exists:
            say(f"lockstep: {short(self._output)} is not there: do the nodes share this directory?")
        where = f"; output: {short(self._output)}" if exists and end.exit_code else ""
        say(f"lockstep: job {self._job} {end.text}{where}")
        if end.hint:
            say(f"hint: {end.hint}")
        return end.exit_code

    def _detach(self, why: str) -> int:
        say(f"\nlockstep: {why}job {self._job} continues without being followed")
        say(f"hint: {self._ways()}")
        return _DETACHED

    def _ways(self) -> str:
        file = shlex.quote(str(short(self._output)))
        return f"follow: tail -f {file} · {self._backend.commands(self._job)}"
