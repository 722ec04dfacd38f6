"""Run directory: paths of logs and records."""

from __future__ import annotations

import contextlib
import itertools
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
    """Return the directory of a launch, made and writable, with `logs/` in it.

    `run_dir` may be new or not; without it the directory is `base/NAME/TIME`, or `base/NAME/STAMP` where
    another launcher of the same launch has chosen one.

    Raises:
        UsageError: if a file is in its place.
        RunDirectoryError: if it cannot be made or written.
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
    """Return the directory of a launch that makes none, for a run that may: see `create`."""
    stamp = stamp or f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    return (base / name / Path(stamp).name).absolute()


def make_logs(path: Path) -> Path:
    """Return a directory for logs, made and writable.

    Raises:
        RunDirectoryError: if it cannot be made or written.
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
    """Return the system's message, and the file, where it names one."""
    return f"{error.strerror} ({error.filename})" if error.filename else str(error.strerror)


def short(path: Path) -> Path:
    """Return `path` relative to the working directory, where it lies below it."""
    with contextlib.suppress(OSError):
        here = Path.cwd()
        return path.relative_to(here) if path.is_relative_to(here) else path
    return path


def owner_only(path: str, flags: int) -> int:
    """Open a file that other users of the machine cannot read: an opener for `open`."""
    return os.open(path, flags, 0o600)


def _make_new(parent: Path) -> Path:
    """Make a directory named after the time that no other launch has, and return it."""
    parent = parent.absolute()
    make_directory(parent)
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        path = parent / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        sync_directory(parent)
        return path
    raise AssertionError("itertools.count does not end")


def _check_writable(directory: Path) -> None:
    # Permissions do not say it all: a read-only mount, a full disk. Writing does; with a name of its
    # own, since launchers of other nodes do the same at the same time.
    with tempfile.NamedTemporaryFile(dir=directory, prefix=".writable-", buffering=0) as probe:
        probe.write(b"1")
