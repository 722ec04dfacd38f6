"""Run directory of a launch: records and log files."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import Self

from lockstep.launch.output import say
from lockstep.launch.plan import Launch
from lockstep.launch.spec import LaunchSpec
from lockstep.state.files import directory, lock
from lockstep.state.files.directory import short

#: In a launcher's private directory: a link to its temporary logs.
LINK = "logs"


class RunDirectory:
    """The directories of a launch, made after the rendezvous of the launchers.

    A script that does not import Lockstep, nor does a module of its own, gets no run directory unless a
    flag names one. Its logs are in a temporary directory, which stays where a rank has failed. If it
    makes a Run after all, through an installed package, that makes the directory, and the logs come there
    at the end.
    """

    def __init__(self, launch: Launch, name: str) -> None:
        self._spec, self.name = launch.spec, name
        self._has_none = _has_no_directory(launch)
        #: Whether the logs stay, if they are temporary.
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
        """Make the directories; `stamp` names the run's on launcher 0, for the others.

        The next launcher removes `private`, and with it temporary logs, if this one is killed.

        Raises:
            RunDirectoryError: if one cannot be made or written.
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
                (private / LINK).symlink_to(self._logs)
        else:
            self._logs = self.path / "logs"
        return self.path

    @property
    def logs(self) -> Path:
        """The directory of the logs."""
        assert self._logs is not None, "made by `make`"
        return self._logs

    @property
    def where(self) -> str:
        """The place of the logs as the end of a message; empty where none will stay."""
        stays = self._logs is not None and (self._temporary is None or self.keeps)
        return f"; logs: {short(self.logs)}" if stays else ""


def remove_left(private: Path) -> None:
    """Remove the private directory of a launcher that is gone, and its temporary logs."""
    logs = private / LINK
    if logs.is_dir() and logs.stat().st_uid == os.getuid():
        shutil.rmtree(logs.resolve())
    shutil.rmtree(private)


def expected(launch: Launch) -> tuple[Path, Path]:
    """Return the directories of a run and of its logs, as far as they are known before a launch."""
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
