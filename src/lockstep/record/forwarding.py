"""Forwarding of logged values to loggers, on the main rank, in a background thread."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import RunDirectoryError
from lockstep.record.directory import owner_only
from lockstep.record.following import Follower
from lockstep.record.loggers import Backend, Say, make
from lockstep.record.run_file import cannot_write

#: Where loggers keep what they need, in the run directory.
DIRECTORY = "loggers"
_EVERY = 1.0
_END_SECONDS = 300.0


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
        self._ranks = ranks
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            state = self._state()
            self._follower = Follower(directory, ranks, resumed, state)
        except OSError as error:
            raise cannot_write(place, error) from error
        self._backends: list[tuple[str, Backend]] = []
        self._has_told = False
        self._ends = threading.Event()

        def work() -> None:
            for logger in loggers:  # seconds, where packages are imported and databases made
                self._open(logger, place, about, int(state.get("step", 0)))
            while not self._ends.wait(_EVERY):
                self._forward(ended=False)

        self._thread = threading.Thread(target=work, name="lockstep-loggers", daemon=True)
        self._thread.start()

    def _state(self) -> dict[str, Any]:
        try:
            state = json.loads(self._path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise RunDirectoryError(
                f"{self._path} cannot be read: {error}", hint="remove it: values are logged again"
            ) from error
        return dict(state)

    def _open(self, logger: Any, place: Path, about: Mapping[str, Any], last: int) -> None:
        name = logger if isinstance(logger, str) else type(logger).__name__
        try:
            self._backends.append(
                (name, make(logger, place, about["name"], about, last, self._say))
            )
        except Exception as error:
            self._warn(name, error)

    def _warn(self, name: str, error: BaseException) -> None:
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._say(f"lockstep: warning: logger {name} has failed, and gets no more values: {what}")

    def _forward(self, *, ended: bool) -> None:
        """Give loggers what has come; where that cannot be read or noted, they get no more."""
        try:
            found = self._follower.read(ended=ended)
            self._tell_unseen(bool(found))
            for step, values in found:
                self._each(lambda backend, s=step, v=values: backend.log(v, s))
            if found:
                self._each(lambda backend: backend.flush())
                self._mark()
        except Exception as error:
            for name, _ in self._backends:
                self._warn(name, error)
            self._backends = []

    def _each(self, call: Any) -> None:
        """Call each logger; one that raises is left out from here on."""
        for name, backend in tuple(self._backends):
            try:
                call(backend)
            except Exception as error:
                self._backends.remove((name, backend))
                self._warn(name, error)

    def _tell_unseen(self, has_begun: bool) -> None:
        unseen = self._follower.unseen
        if unseen and has_begun and not self._has_told:
            self._has_told = True
            self._say(
                f"lockstep: warning: loggers get the values of {self._ranks - unseen} of {self._ranks} "
                "ranks: the others keep their events on disks that the main rank does not share"
            )

    def _mark(self) -> None:
        """Note what has been logged, so that a later generation does not log it again."""
        draft = self._path.with_suffix(".draft")
        with open(draft, "w", encoding="utf-8", opener=owner_only) as file:
            json.dump(self._follower.state(), file)
        draft.replace(self._path)

    def close(self, *, ended: bool, failed: bool) -> None:
        """Forward what is left, and close the loggers.

        Args:
            ended: all ranks have come to the end of the run, and have written what they logged.
            failed: the run ends by an error.
        """
        if self._ends.is_set():
            return
        self._ends.set()
        self._thread.join(_END_SECONDS)
        if self._thread.is_alive():
            self._say(
                f"lockstep: warning: loggers were not done {_END_SECONDS:.0f} s after the run"
            )
            return
        self._forward(ended=ended)
        self._each(lambda backend: backend.close(failed=failed))
