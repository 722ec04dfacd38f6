"""Directories that a launcher makes: run directory, directory of log files, and a temporary one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Self

from lockstep.launch.output import say
from lockstep.launch.plan import Launch
from lockstep.launch.spec import LaunchSpec
from lockstep.state.files import directory, lock
from lockstep.state.files.directory import short
from lockstep.world import host

#: Name of a link to temporary log files, in the launcher's private directory.
_LINK = "logs"
#: Prefix of a launcher's private directory, and name of the lock file in it.
_PREFIX, LOCK = "lockstep-", "launcher.lock"


class RunDirectory:
    """The run directory and the directory of log files of a launch.

    If neither the script nor a module of the user imports Lockstep, the launch gets no run directory unless
    a flag names one. Its log files are in a temporary directory, which is kept only if a rank fails. If the
    script makes a `Run` through an installed package, `Run` makes the run directory, and the log files are
    moved there at the end.
    """

    def __init__(self, launch: Launch, name: str) -> None:
        self._spec, self.name = launch.spec, name
        self._has_none = _has_no_directory(launch)
        #: Whether to keep temporary log files.
        self.keeps = False
        self.path: Path | None = None
        self._logs: Path | None = None
        self._temporary: Path | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.path is not None:
            lock.leave(self.path)
        if self._temporary is None or self.keeps:
            return
        logs = list(self._temporary.glob("*"))
        hidden = any(log.stat().st_size > 0 for log in logs if log.name != "rank-0.log")
        if kind is None and self._spec.streams.is_default and hidden:
            say(
                "lockstep: ranks other than 0 have printed, too: -t 0 shows it, --log-dir DIR keeps it"
            )
        if self.path is not None and self.path.is_dir():
            (self.path / "logs").mkdir(exist_ok=True)
            for log in logs:
                shutil.move(log, self.path / "logs" / log.name)
        shutil.rmtree(self._temporary, ignore_errors=True)

    def make(self, stamp: str | None, private: Path) -> Path:
        """Make the directories of this launch; return the run directory.

        The run directory is named `stamp`, if launcher 0 chose a name. If the log files are in a temporary
        directory, a link in `private` leads to it: if this launcher is killed, a later launcher removes
        both.

        Raises:
            RunDirectoryError: if a directory cannot be made or written.
        """
        if self._has_none:
            self.path = directory.name_new(self.name, stamp=stamp)
        else:
            self.path = directory.create(self._spec.run_dir, self.name, stamp=stamp)
        if self._spec.log_dir is not None:
            self._logs = directory.make_logs(_in(self._spec.log_dir, self._spec, self.path))
        elif self._has_none:
            self._temporary = self._logs = Path(tempfile.mkdtemp(prefix=f"{self.name}-logs-"))
            with contextlib.suppress(OSError):  # without links, a killed launcher leaves its logs
                (private / _LINK).symlink_to(self._logs)
        else:
            self._logs = self.path / "logs"
        return self.path

    @property
    def logs(self) -> Path:
        """Directory of the log files."""
        assert self._logs is not None, "made by `make`"
        return self._logs

    @property
    def where(self) -> str:
        """Text `; logs: DIRECTORY` with which a message ends; empty if the log files will be removed."""
        stays = self._logs is not None and (self._temporary is None or self.keeps)
        return f"; logs: {short(self.logs)}" if stays else ""


def expected(launch: Launch) -> tuple[Path, Path]:
    """Return the run directory and log directory that a launch would use, for `--dry-run`."""
    spec = launch.spec
    run_dir = (spec.run_dir or Path("runs") / spec.name / "TIME").absolute()
    if spec.log_dir is not None:
        return run_dir, _in(spec.log_dir, spec, run_dir).absolute()
    if _has_no_directory(launch):
        return run_dir, Path(tempfile.gettempdir()) / f"{spec.name}-logs-PRIVATE"
    return run_dir, run_dir / "logs"


def _in(log_dir: Path, spec: LaunchSpec, run_dir: Path) -> Path:
    return log_dir / f"{spec.nodes.id or spec.name}_{run_dir.name}"


def _has_no_directory(launch: Launch) -> bool:
    spec = launch.spec
    asked = spec.run_dir is not None or (spec.log_dir is None and spec.streams.asks_for_files)
    return not asked and spec.kind != "function" and not launch.sources.uses_lockstep


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """Context manager: make a temporary directory for this user alone, and remove it at the end.

    Directories of killed launchers are removed, too: a running launcher keeps its directory locked.
    """
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*/{LOCK}"):
        _remove_left(left)
    path = Path(tempfile.mkdtemp(prefix=_PREFIX))
    lock = os.open(path / "new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
            os.write(lock, host.identity().encode())
            (path / "new").rename(path / LOCK)
        yield path
    finally:
        os.close(lock)
        shutil.rmtree(path, ignore_errors=True)


def _remove_left(file: Path) -> None:
    """Remove temporary directory and logs of the launcher with lock file `file`, if it no longer runs."""
    with contextlib.suppress(OSError):  # another user's, or locked by a running launcher
        if file.parent.is_symlink() or file.parent.stat().st_uid != os.getuid():
            return
        lock = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # On a file system shared by nodes, locks may be local to a node: compare the host too.
            if os.pread(lock, 4096, 0) == host.identity().encode():
                logs = file.parent / _LINK
                if logs.is_dir() and logs.stat().st_uid == os.getuid():
                    shutil.rmtree(logs.resolve())
                shutil.rmtree(file.parent)
        finally:
            os.close(lock)
