"""Forward logged values to loggers such as TensorBoard, on the main rank, in a background thread.

About once a second, loggers get the values of the steps that all ranks have completed, and are flushed.
Then `progress.json` records the last step, and the offset in each file of `events/` at which the next step
begins. After a restart, forwarding continues at these offsets. If the process is killed after the flush and
before `progress.json` is written, the values of about a second are forwarded twice. A logger that does not
write when it is flushed loses values if the process is killed.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import methodcaller
from pathlib import Path
from typing import Any

from lockstep.errors import RunDirectoryError
from lockstep.state.files.atomic_file import atomic_write, sync_directory, sync_file
from lockstep.state.files.run_file import writing
from lockstep.state.record import trainjob
from lockstep.state.record.following import Follower
from lockstep.state.record.loggers import Backend, Say, make

#: Name of the directory for files of loggers in the run directory.
DIRECTORY = "loggers"
_EVERY = 1.0
#: Seconds that loggers may take to close: after a finished run, and before a preemption or a restart, when
#: a scheduler or a launcher waits for the process to exit.
_END_SECONDS, _HURRY_SECONDS = 300.0, 10.0
#: Seconds after which a message names the loggers that have not closed yet.
_QUIET_SECONDS = 5.0
_NAME = "lockstep-loggers"


class Forwarding:
    """Passes the logged values of a run to its loggers, in a thread that the constructor starts.

    Args:
        loggers: names, or objects with `log`.
        directory: the run directory.
        identity: script, arguments, seed and so on of the run.
        ranks: number of ranks.
        resumed: the step after which this (re)start continues.
        say: shows a message, from any thread.

    Raises:
        RunDirectoryError: if the files of an earlier (re)start are damaged.
    """

    def __init__(
        self,
        loggers: Sequence[Any],
        directory: Path,
        identity: Mapping[str, Any],
        *,
        ranks: int,
        resumed: int,
        say: Say,
    ) -> None:
        self._say, self._ranks = say, ranks
        self._directory = directory / DIRECTORY
        self._path = self._directory / "progress.json"
        with writing(self._directory):
            self._directory.mkdir(mode=0o700, exist_ok=True)
            progress = self._read_progress()
            self._follower = Follower(directory, ranks, resumed, progress)
        #: The last step that was forwarded, and the names of its values; more values may come later.
        self._step: int = progress.get("step", -1)
        self._names: set[str] = set(progress.get("names", ()))
        self._open: list[tuple[str, Backend]] = []
        self._has_warned = False
        self._ends = threading.Event()
        self._end: tuple[bool, bool] | None = None
        self._thread = threading.Thread(
            target=self._run, args=(loggers, identity), name=_NAME, daemon=True
        )
        self._thread.start()

    def _read_progress(self) -> dict[str, Any]:
        try:
            return dict(json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError) as error:
            raise RunDirectoryError(
                f"{self._path} cannot be read: {error}",
                hint="remove it: loggers get all values of the run again",
            ) from error

    def _run(self, loggers: Sequence[Any], identity: Mapping[str, Any]) -> None:
        for logger in loggers:  # seconds, where packages are imported and databases made
            name = logger if isinstance(logger, str) else type(logger).__name__
            try:
                backend = make(logger, self._directory, identity, self._step + 1, self._say)
            except Exception as error:
                self._warn(name, error)
            else:
                self._open.append((name, backend))
        if trainjob.has_server(os.environ):
            status = trainjob.TrainJobStatus(
                self._directory.parent / "events/rank-0.jsonl", self._say
            )
            self._open.append(("trainjob", status))
        while not self._ends.wait(_EVERY):
            self._forward(ended=False)
        if self._end is not None:
            self._close_all(*self._end)

    def _forward(self, *, ended: bool) -> None:
        """Pass new values to the loggers; without an `ended` run, only those of completed steps.

        A logger that raises an error is dropped. An error in the events or in `progress.json` drops all.
        """
        try:
            found = self._follower.read(ended=ended)
            self._warn_of_unseen(bool(found))
            for step, values in found:
                if new := self._new(step, values):
                    self._each(methodcaller("log", new, step))
            if found:
                self._each(methodcaller("flush"))
                progress = {"step": self._step, "names": sorted(self._names)}
                content = json.dumps(self._follower.state() | progress)
                # A kill repeats what was flushed before the file has its name; the disk may take longer.
                atomic_write(self._path, content, 0o600, sync=False)
                sync_file(self._path)
                sync_directory(self._directory)
        except Exception as error:
            for logger in tuple(self._open):
                self._leave_out(logger, error)

    def _new(self, step: int, values: Mapping[str, float]) -> dict[str, float]:
        """Return those `values` of a step that have not been forwarded, for instance before a restart."""
        if step < self._step:
            return {}
        if step > self._step:
            self._step, self._names = step, set()
        new = {name: value for name, value in values.items() if name not in self._names}
        self._names |= new.keys()
        return new

    def _each(self, call: Callable[[Backend], None]) -> None:
        """Run `call` on each logger; a logger that raises an error gets no more values."""
        for logger in tuple(self._open):
            try:
                call(logger[1])
            except Exception as error:
                self._leave_out(logger, error)

    def _leave_out(self, logger: tuple[str, Backend], error: Exception) -> None:
        self._open.remove(logger)
        self._warn(logger[0], error)

    def _warn(self, name: str, error: BaseException) -> None:
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._say(f"lockstep: warning: logger {name} has failed, and gets no more values: {what}")

    def _warn_of_unseen(self, has_begun: bool) -> None:
        unseen = self._follower.unseen
        if unseen and has_begun and not self._has_warned:
            self._has_warned = True
            self._say(
                f"lockstep: warning: loggers get the values of {self._ranks - unseen} of {self._ranks} "
                "ranks: the others keep their events on disks that the main rank does not share"
            )

    def close(self, *, ended: bool, failed: bool) -> None:
        """Forward the remaining values and close the loggers, and wait for that with a time limit.

        Args:
            ended: whether all ranks have reached the end of the run and have written their logged values.
            failed: whether the run ends by an error.
        """
        if self._ends.is_set():
            return
        self._end = ended, failed
        self._ends.set()
        self._thread.join(_QUIET_SECONDS)
        seconds = _END_SECONDS if ended else _HURRY_SECONDS
        if ended and self._thread.is_alive():
            self._say(f"lockstep: waiting for loggers to close: {self._open_names}")
        self._thread.join(seconds - _QUIET_SECONDS)
        if self._thread.is_alive():
            self._say(
                f"lockstep: warning: loggers have not closed within {seconds:.0f} s: {self._open_names}; "
                "they may lack the last values"
            )

    @property
    def _open_names(self) -> str:
        return ", ".join(name for name, _ in self._open)

    def _close_all(self, ended: bool, failed: bool) -> None:
        """Forward the remaining values, then close all loggers at the same time, each in a thread.

        The arguments are those of `close`.
        """
        self._forward(ended=ended)

        def close(logger: tuple[str, Backend]) -> None:
            try:
                logger[1].close(failed=failed)
            except Exception as error:
                self._warn(logger[0], error)
            self._open.remove(logger)

        closing = [
            threading.Thread(target=close, args=(logger,), name=_NAME, daemon=True)
            for logger in self._open
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()


def are_closing() -> bool:
    """Return whether a thread of `Forwarding` still runs, since a logger has not closed yet."""
    return any(thread.name == _NAME for thread in threading.enumerate())
