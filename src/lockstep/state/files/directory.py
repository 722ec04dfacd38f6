"""Choose and make the run directory of a launch and its directory for logs, and check both."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

from lockstep.errors import RunDirectoryError, UsageError
from lockstep.state.files.atomic_file import make_directory, sync_directory

_HINT = "--run-dir DIR names another place"


def create(
    run_dir: Path | None, name: str, base: Path = Path("runs"), *, stamp: str | None = None
) -> Path:
    """Make and return a launch's run directory with `logs/` in it, and check that it can be written.

    `run_dir` may exist already. Without `run_dir` the directory is `base/NAME/TIME`: NAME is the `name` of
    the run, TIME the present time. On further nodes of a launch, `stamp` is the TIME that node 0 has
    chosen.

    Raises:
        UsageError: if a file has the directory's path.
        RunDirectoryError: if the directory cannot be made or written.
    """
    try:
        if run_dir is None and stamp is not None:
            run_dir = base / name / Path(stamp).name
        path = _make_new(base / name) if run_dir is None else run_dir.absolute()
        logs = path / "logs"
        make_directory(logs)
        _check_writable(logs)
    except (NotADirectoryError, FileExistsError):
        raise UsageError(
            f"the run directory {run_dir or base / name} is a file, or is below one; expected a directory, "
            "or nothing there yet",
            hint=_HINT,
        ) from None
    except OSError as error:
        raise RunDirectoryError(
            f"the run directory {run_dir or base / name} cannot be used: {_reason(error)}",
            hint=_HINT,
        ) from error
    return path


def name_new(name: str, base: Path = Path("runs"), *, stamp: str | None = None) -> Path:
    """Return a path `base/NAME/STAMP` for a new run directory, without making the directory.

    NAME is the `name` of the run. `stamp` is by default the present time with the process id.
    """
    stamp = stamp or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return (base / name / Path(stamp).name).absolute()


def make_logs(path: Path) -> Path:
    """Make and return a directory for logs, and check that it can be written.

    Raises:
        RunDirectoryError: if the directory cannot be made or written.
    """
    path = path.absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        _check_writable(path)
    except OSError as error:
        raise RunDirectoryError(
            f"the log directory {path} cannot be used: {_reason(error)}",
            hint="--log-dir DIR names another place",
        ) from None
    return path


def _reason(error: OSError) -> str:
    """Return the system's error message, with the file name if the error names one."""
    return f"{error.strerror} ({error.filename})" if error.filename else str(error.strerror)


def short(path: Path) -> Path:
    """Return `path` relative to the working directory if it lies below that directory, else unchanged."""
    with contextlib.suppress(OSError):
        here = Path.cwd()
        return path.relative_to(here) if path.is_relative_to(here) else path
    return path


def owner_only(path: str, flags: int) -> int:
    """Open a file with mode 0600, which other users cannot read; for the argument `opener` of `open`."""
    return os.open(path, flags, 0o600)


def _make_new(parent: Path) -> Path:
    """Make and return a directory in `parent`, named by the present time, with a number if needed."""
    parent = parent.absolute()
    make_directory(parent)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    path, number = parent / stamp, 1
    while True:
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            break
        number += 1
        path = parent / f"{stamp}-{number}"
    sync_directory(parent)
    return path


def _check_writable(directory: Path) -> None:
    # Permissions alone do not show a read-only mount or a full disk, so a file is written. Its name is
    # random, since launchers of other nodes write one at the same time.
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".writable-", buffering=0) as probe:
        probe.write(b"1")
