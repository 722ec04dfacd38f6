"""Submit a request as a job, with its files in the run directory."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import RunDirectoryError, UsageError
from lockstep.state.files import directory
from lockstep.state.files.directory import short
from lockstep.tools.submit import slurm
from lockstep.tools.submit.request import JobRequest
from lockstep.tools.submit.script import job_script, output_file
from lockstep.tools.submit.terminal import say


def submit(request: JobRequest, run_dir: Path | None, name: str) -> tuple[str, Path]:
    """Write the job script of `request` and hand it to Slurm.

    Args:
        request: what is asked for.
        run_dir: the run's directory; `None` makes a new one.
        name: name of the run.

    Returns:
        The job's number, and the file that will have its output.

    Raises:
        UsageError: if Slurm does not take it; then nothing is left.
        RunDirectoryError: if the directory cannot be used.
    """
    existed = run_dir is not None and run_dir.exists()
    path = directory.create(run_dir, name)
    with _undone(path, existed=existed, new=run_dir is None):
        text = job_script(request, directory=Path.cwd(), run_dir=path, python=sys.executable)
        file = path / "job.sh"
        _write(file, text)
        job = _hand_in(file)
    say(f"lockstep: job {job} submitted: {short(file)}")
    output = output_file(path, job)
    say(f"lockstep: its output: {short(output)}")
    return job, output


def _hand_in(file: Path) -> str:
    try:
        taken = slurm.submit(file)
    except KeyboardInterrupt:
        say("\nlockstep: stopped while sbatch was at work; squeue --me shows if there is a job")
        raise
    if taken.warnings:
        say(f"lockstep: sbatch says: {taken.warnings}")
    return taken.job


def _write(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise RunDirectoryError(f"{file} cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def _undone(path: Path, *, existed: bool, new: bool) -> Iterator[None]:
    """Remove a directory made for a job that Slurm did not take."""
    try:
        yield
    except UsageError:
        if not existed:
            (path / "job.sh").unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the first that is not empty is not ours
                for made in (path / "logs", path, *([path.parent, path.parent.parent] * new)):
                    made.rmdir()
        raise
