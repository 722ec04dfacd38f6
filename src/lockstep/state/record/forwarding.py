"""Forwarding of logged values to loggers, on the main rank, in a background thread."""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lockstep.errors import RunDirectoryError
from lockstep.state.files.atomic_file import atomic_write
from lockstep.state.files.run_file import cannot_write
from lockstep.state.record.curves import curves
from lockstep.state.record.following import Follower
from lockstep.state.record.given import NOTHING, GivenFile, latest, missing
from lockstep.state.record.loggers import Backend, Say, make
from lockstep.state.record.reading import events_of

#: Where loggers keep what they need, in the run directory.
DIRECTORY = "loggers"
_EVERY = 1.0
#: Steps that are given again between two notes of it.
_FLUSH_STEPS = 100
#: How long loggers may take to close: after a run that is done, and where a scheduler that has given
#: notice, or a launcher that starts the run again, waits for the process to end.
_END_SECONDS, _HURRY_SECONDS = 300.0, 10.0
#: After so many of them the user hears what is waited for.
_QUIET_SECONDS = 5.0
_NAME = "lockstep-loggers"


class Forwarding:
    """The loggers of a run.

    Args:
        loggers: names, or objects with `log`.
        directory: the run directory.
        about: identity of the run.
        ranks: number of ranks.
        resumed: the step after which this generation continues.
        say: tells the user how it goes, from any thread.

    Raises:
        RunDirectoryError: if what an earlier generation has left is damaged.
    """

    def __init__(
        self,
        loggers: Sequence[Any],
        directory: Path,
        about: Mapping[str, Any],
        *,
        ranks: int,
        resumed: int,
        say: Say,
    ) -> None:
        self._say = say
        place = directory / DIRECTORY
        self._path = place / "progress.json"
        self._ranks, self._resumed = ranks, resumed
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            state = self._state()
            self._follower = Follower(directory, ranks, resumed, state)
        except OSError as error:
            raise cannot_write(place, error) from error
        self._open: list[_Logger] = []
        self._has_told = False
        self._ends = threading.Event()
        self._end: tuple[bool, bool] | None = None

        def work() -> None:
            names = Counter[str]()
            for logger in loggers:  # seconds, where packages are imported and databases made
                name = logger if isinstance(logger, str) else type(logger).__name__
                self._add(name, logger, place, about, place / f"given-{name}-{names[name]}.json")
                names[name] += 1
            self._give_again(directory)
            while not self._ends.wait(_EVERY):
                self._forward(ended=False)
            if self._end is not None:
                self._close_all(*self._end)

        self._thread = threading.Thread(target=work, name=_NAME, daemon=True)
        self._thread.start()

    def _state(self) -> dict[str, Any]:
        try:
            state = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise RunDirectoryError(
                f"{self._path} cannot be read: {error}",
                hint="remove it: each logger continues behind its own last step",
            ) from error
        return dict(state)

    def _add(
        self, name: str, logger: Any, place: Path, about: Mapping[str, Any], given: Path
    ) -> None:
        try:
            file = GivenFile(given)
        except (OSError, ValueError) as error:
            self._warn(name, error)
            return
        try:
            first = 0 if file.value is None else file.value[0] + 1
            backend = make(logger, place, about["name"], about, first, self._say)
        except Exception as error:
            file.close()
            self._warn(name, error)
        else:
            self._open.append(_Logger(name, backend, file))

    def _give_again(self, directory: Path) -> None:
        """Give loggers what they lack of the steps that this generation does not compute again.

        W&B loses values in a kill, and a logger may have failed in an earlier generation, or be new.
        """
        lacking = [one for one in self._open if one.given[0] <= self._resumed]
        if not (lacking and self._resumed):
            return
        try:
            steps: defaultdict[int, dict[str, float]] = defaultdict(dict)
            first = min(logger.given[0] for logger in lacking)
            for name, values in curves(events_of(directory, "rank", first)).items():
                for step, value in values.items():
                    steps[step][name] = value
        except Exception as error:
            for logger in lacking:
                self._leave_out(logger, error)
            return
        for number, step in enumerate(sorted(step for step in steps if step <= self._resumed)):
            self._each(partial(_Logger.log, step=step, values=steps[step]), lacking)
            if number % _FLUSH_STEPS == 0:
                self._each(_Logger.flush, lacking)
        self._each(_Logger.flush, lacking)

    def _warn(self, name: str, error: BaseException) -> None:
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._say(f"lockstep: warning: logger {name} has failed, and gets no more values: {what}")

    def _forward(self, *, ended: bool) -> None:
        """Give loggers what has come; where that cannot be read or noted, they get no more."""
        try:
            found = self._follower.read(ended=ended)
            self._tell_unseen(bool(found))
            for step, values in found:
                self._each(partial(_Logger.log, step=step, values=values))
            if found:
                self._each(_Logger.flush)
                self._mark()
        except Exception as error:
            for logger in tuple(self._open):
                self._leave_out(logger, error)

    def _each(
        self, call: Callable[[_Logger], None], loggers: Sequence[_Logger] | None = None
    ) -> None:
        """Call each logger, or some of them; one that raises is left out from here on."""
        chosen = self._open if loggers is None else loggers
        for logger in [one for one in self._open if one in chosen]:
            try:
                call(logger)
            except Exception as error:
                self._leave_out(logger, error)

    def _leave_out(self, logger: _Logger, error: Exception) -> None:
        self._open.remove(logger)
        logger.drop()
        self._warn(logger.name, error)

    def _tell_unseen(self, has_begun: bool) -> None:
        unseen = self._follower.unseen
        if unseen and has_begun and not self._has_told:
            self._has_told = True
            self._say(
                f"lockstep: warning: loggers get the values of {self._ranks - unseen} of {self._ranks} "
                "ranks: the others keep their events on disks that the main rank does not share"
            )

    def _mark(self) -> None:
        """Note up to where events have been read, so that a later generation need not read them again."""
        atomic_write(self._path, json.dumps(self._follower.state()), 0o600)

    def close(self, *, ended: bool, failed: bool) -> None:
        """Forward what is left, and close the loggers; one that does not close in time is left.

        Args:
            ended: all ranks have come to the end of the run, and have written what they logged.
            failed: the run ends by an error.
        """
        if self._ends.is_set():
            return
        self._end = ended, failed
        self._ends.set()
        self._thread.join(_QUIET_SECONDS)
        seconds = _END_SECONDS if ended else _HURRY_SECONDS
        if ended and self._thread.is_alive():
            self._say(f"lockstep: waiting for loggers to close: {self._names}")
        self._thread.join(seconds - _QUIET_SECONDS)
        if self._thread.is_alive():
            self._say(
                f"lockstep: warning: loggers have not closed within {seconds:.0f} s: {self._names}; "
                "they may lack the last values"
            )

    @property
    def _names(self) -> str:
        return ", ".join(one.name for one in self._open)

    def _close_all(self, ended: bool, failed: bool) -> None:
        """Close loggers at the same time: one that waits for a network keeps no other from closing."""
        self._forward(ended=ended)
        closing = [
            threading.Thread(target=self._close, args=(logger, failed), name=_NAME, daemon=True)
            for logger in self._open
        ]
        for thread in closing:
            thread.start()
        for thread in closing:
            thread.join()

    def _close(self, logger: _Logger, failed: bool) -> None:
        self._each(partial(_Logger.close, failed=failed), [logger])
        if logger in self._open:
            self._open.remove(logger)


def are_closing() -> bool:
    """Return whether a logger of this process has been left, since it did not close in time."""
    return any(thread.name == _NAME for thread in threading.enumerate())


class _Logger:
    """A logger that is open: it gets each value once, through restarts.

    Args:
        name: for messages.
        backend: takes the values.
        file: says what it took in earlier generations.

    Attributes:
        given: what it has.
    """

    def __init__(self, name: str, backend: Backend, file: GivenFile) -> None:
        self.name = name
        self._backend = backend
        self._file = file
        noted = file.value or NOTHING
        self.given = noted if backend.held is None else latest(file.certain, backend.held)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log those values of a step that have not been logged."""
        left = missing(step, values, self.given)
        if left:
            given = latest(self.given, (step, frozenset(left)))
            self._backend.log(left, step)
            self.given = given
            if not self._backend.keeps:
                self._file.write(self.given)

    def flush(self) -> None:
        """Let no later kill lose what was logged."""
        self._backend.flush()
        self._file.write(self.given)

    def close(self, *, failed: bool) -> None:
        """Close the logger."""
        self._backend.close(failed=failed)
        self._file.write(self.given, closed=True)
        self._file.close()

    def drop(self) -> None:
        """Leave out a logger that has failed."""
        self._file.close()
