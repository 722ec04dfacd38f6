"""Submit a request as a job, with its files in the run directory."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

from lockstep.errors import RunDirectoryError, UsageError
from lockstep.state.files import directory
from lockstep.state.files.directory import short
from lockstep.tools.submit.backend import Backend, Submission
from lockstep.tools.submit.request import JobRequest


def say(text: str) -> None:
    """Print a message of `lockstep submit` beside the job's output."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the command's own words


def submit(
    backend: Backend, request: JobRequest, run_dir: Path | None, name: str
) -> tuple[str, Path]:
    """Write the job script of `request` and submit it; return the job's id, and the file of its output.

    Without `run_dir`, a new directory for a run of this name is made.

    Raises:
        UsageError: if the backend does not take it; then nothing is left.
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
            with contextlib.suppress(OSError):  # the first that is not empty is not ours
                for made in (path / "logs", path, *above):
                    made.rmdir()
        raise
    if taken.warnings:
        say(f"lockstep: {backend.program} says: {taken.warnings}")
    say(f"lockstep: job {taken.job} submitted: {short(file)}")
    output = backend.output(path, taken.job)
    say(f"lockstep: its output: {short(output)}")
    return taken.job, output


def _submit(backend: Backend, file: Path, text: str) -> Submission:
    try:
        file.write_text(text)
    except OSError as error:
        raise RunDirectoryError(f"{file} cannot be written: {error.strerror}") from None
    try:
        return backend.submit(file)
    except KeyboardInterrupt:
        say(
            f"\nlockstep: stopped while {backend.program} was at work; {backend.commands()} shows if there "
            "is a job"
        )
        raise
