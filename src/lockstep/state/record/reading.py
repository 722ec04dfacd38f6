"""Read the records of a run: for reports, benchmarks, and `lockstep watch`."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.errors import RunDirectoryError, UsageError
from lockstep.state.files import run_file

Event = dict[str, Any]
#: A line of what was logged: parsing each line of a long run takes ten times as long as this.
_LOGGED = re.compile(rb'"kind": ?"log".*?"step": ?(\d+)')
#: Fields of a log event that are no values.
_OF_EVENTS = frozenset({"kind", "time", "epoch", "step", "replica", "weight"})


@dataclass(frozen=True)
class Recorded:
    """The records of a run, as they were when each was asked for first."""

    directory: Path
    run: dict[str, Any]

    @staticmethod
    def of(directory: Path) -> Recorded:
        """Read the records in a run directory.

        Raises:
            UsageError: if there are none.
            RunDirectoryError: if they are damaged, or of a newer format.
        """
        run = run_file.read(directory)
        if run is None:
            raise UsageError(
                f"{directory} has no {run_file.NAME}; expected the directory of a run",
                hint="runs/NAME/TIME, or what --run-dir named",
            )
        return Recorded(directory, run)

    @cached_property
    def ranks(self) -> dict[int, list[Event]]:
        """The events of each rank, in the order in which they were written."""
        return self._events("rank")

    @cached_property
    def launchers(self) -> dict[int, list[Event]]:
        """The events of the launcher of each node."""
        return self._events("launcher")

    def _events(self, kind: str) -> dict[int, list[Event]]:
        return _events(self.directory, kind)


def logged_from(directory: Path, step: int) -> dict[int, list[Event]]:
    """Return the events of each rank without what was logged before a step.

    Args:
        directory: of the run.
        step: in a long run only what is returned takes memory.

    Raises:
        RunDirectoryError: if they cannot be read.
    """
    return _events(directory, "rank", step)


def _events(directory: Path, kind: str, step: int = 0) -> dict[int, list[Event]]:
    paths = (directory / "events").glob(f"{kind}-*.jsonl")
    numbered = {path.stem.removeprefix(f"{kind}-"): path for path in paths}
    return {
        int(k): read_events(numbered[k], step) for k in sorted(numbered, key=_number) if k.isdigit()
    }


def _number(text: str) -> int:
    return int(text) if text.isdigit() else -1


def read_events(path: Path, step: int = 0) -> list[Event]:
    """Return the events in a file without lines that are only a part: being written, or left by a kill.

    Args:
        path: of the file.
        step: what was logged before it is left out.

    Raises:
        RunDirectoryError: if it cannot be read, or holds something else than events.
    """
    try:
        with path.open("rb") as file:
            return [
                event
                for line in file
                if line.endswith(b"\n") and not _is_before(line, step)
                if (event := parse(line.decode(errors="replace"))) is not None
            ]
    except (OSError, TypeError) as error:
        raise RunDirectoryError(
            f"{path} cannot be read: {error}", hint="restore the file, or remove it"
        ) from error


def _is_before(line: bytes, step: int) -> bool:
    """Return whether a line is of a value that was logged before a step; a line of another form is not."""
    found = _LOGGED.search(line) if step else None
    return found is not None and int(found[1]) < step


def parse(line: str | bytes) -> Event | None:
    """Return the event of a line; `None` where the line is only a part of one.

    Raises:
        TypeError: if it is something else.
    """
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("time"), (int, float)):
        raise TypeError(f"no event: {line[:80]!r}")
    return {"kind": "", **event}


def values_of(event: Event) -> list[tuple[str, float]]:
    """Return the numbers of a log event, by name."""
    return [
        (name, float(value))
        for name, value in event.items()
        if name not in _OF_EVENTS and isinstance(value, (int, float))
    ]


@dataclass(slots=True)
class Mean:
    """A weighted mean; values of weight 0 don't count."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float) -> None:
        """Take one value more."""
        if weight:
            self.total += value * weight
            self.weight += weight

    @property
    def value(self) -> float:
        """The mean; NaN without values."""
        return self.total / self.weight if self.weight else math.nan
