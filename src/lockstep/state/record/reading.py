"""Read `run.json` and the event files of a run, also while the run is still writing them."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.errors import RunDirectoryError, UsageError
from lockstep.state.files import run_file

Event = dict[str, Any]
#: Fields of a log event besides the logged values.
_OF_EVENTS = frozenset({"kind", "time", "epoch", "step", "replica", "weight"})


@dataclass(frozen=True)
class RunRecords:
    """The contents of `run.json` and of the event files of a run; events are read at first use."""

    directory: Path
    run: dict[str, Any]

    @staticmethod
    def of(directory: Path) -> RunRecords:
        """Return the `RunRecords` of a run directory, after reading its `run.json`.

        Raises:
            UsageError: if the directory has no `run.json`.
            RunDirectoryError: if `run.json` is damaged, or of a newer format.
        """
        run = run_file.read(directory)
        if run is None:
            raise UsageError(
                f"{directory} has no {run_file.NAME}; expected the directory of a run",
                hint="runs/NAME/TIME, or what --run-dir named",
            )
        return RunRecords(directory, run)

    @cached_property
    def ranks(self) -> dict[int, list[Event]]:
        """The events that each rank has written, in that order, by rank."""
        return events_of(self.directory, "rank")

    @cached_property
    def launchers(self) -> dict[int, list[Event]]:
        """The events that the launcher of each node has written, in that order, by node."""
        return events_of(self.directory, "launcher")


@dataclass(slots=True)
class LineReader:
    """Reads a growing file by complete lines: each call of `lines` yields only the new ones.

    If the file has become shorter, it is read from its beginning again.
    """

    path: Path
    offset: int = 0  # of the first line that has not been read
    #: number of bytes at the end of the file that the first call reads; `None` for all
    most: int | None = None

    def lines(self) -> Iterator[bytes]:
        """Yield the complete lines that were added to the file since the previous call.

        While the caller handles a line, `offset` is the position of the first byte of that line.

        Raises:
            OSError: if the file cannot be read.
        """
        with self.path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if not 0 < self.offset <= size:
                self.offset = 0 if self.most is None else max(0, size - self.most)
                file.seek(self.offset)
                if self.offset:
                    self.offset += len(file.readline())  # the end of a line
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):  # incomplete: being written, or its writer was killed
                    return
                yield line
                self.offset += len(line)

    def events(self) -> Iterator[Event]:
        """Yield the events in the lines that were added to the file since the previous call.

        Raises:
            RunDirectoryError: if the file cannot be read, or has a line of JSON that is not an event.
        """
        try:
            for line in self.lines():
                if (event := _parse(line)) is not None:
                    yield event
        except (OSError, TypeError) as error:
            raise RunDirectoryError(
                f"{self.path} cannot be read: {error}", hint="restore the file, or remove it"
            ) from error


def events_of(directory: Path, kind: str) -> dict[int, list[Event]]:
    """Return the events in a run directory, as lists by the number of the rank or launcher.

    `kind` is `rank` for the events of ranks, `launcher` for those of launchers.

    Raises:
        RunDirectoryError: if the events cannot be read.
    """
    paths = (directory / "events").glob(f"{kind}-*.jsonl")
    named = {path.stem.removeprefix(f"{kind}-"): path for path in paths}
    numbered = {int(name): path for name, path in named.items() if name.isdecimal()}
    return {k: list(LineReader(numbered[k]).events()) for k in sorted(numbered)}


def _parse(line: bytes) -> Event | None:
    """Return the event in a line of an event file; `None` if the line is not valid JSON.

    The last line is incomplete if the process that wrote it was killed.

    Raises:
        TypeError: if the line is JSON, but not an event.
    """
    try:
        event = json.loads(line.decode(errors="replace"))
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("time"), (int, float)):
        raise TypeError(f"no event: {line[:80]!r}")
    return {"kind": "", **event}


def values_of(event: Event) -> list[tuple[str, float]]:
    """Return name and value of each number that the script has logged in an event of kind `log`."""
    return [
        (name, float(value))
        for name, value in event.items()
        if name not in _OF_EVENTS and isinstance(value, (int, float))
    ]


def describe(event: Event) -> str | None:
    """Return a line of text for an event: checkpoint, failed audit, failure, restart or end.

    Returns `None` for an event of another kind.
    """
    match event["kind"]:
        case "checkpoint":
            best = "" if event.get("best") is None else f", best={event['best']:.4g}"
            return f"checkpoint {event['name']}, written in {event['seconds']:.2f} s{best}"
        case "audit":
            who = "it is not known which rank computes wrongly"
            if "rank" in event:
                who = (
                    f"rank {event['rank']} on {event['host']} ({event['device']}) computes wrongly"
                )
            return (
                f"audit of step {event['step']}: {who}; confirmed up to step {event['confirmed']}"
            )
        case "failure":
            return str(event["text"])
        case "restart":
            return f"restart {event['generation']}"
        case "end":
            return f"the launch ends with exit code {event['exit_code']}"
    return None


@dataclass(slots=True)
class Mean:
    """Running weighted mean of the added values; a value with weight 0 is ignored, even NaN."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float) -> None:
        """Add a value to the mean, unless its weight is 0."""
        if weight:
            self.total += value * weight
            self.weight += weight

    @property
    def value(self) -> float:
        """The weighted mean of the added values; NaN without values."""
        return self.total / self.weight if self.weight else math.nan
