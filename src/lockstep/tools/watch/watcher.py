"""`Watcher`: read the state of a run repeatedly from its run directory."""

from __future__ import annotations

import contextlib
import re
import time
from collections import deque
from pathlib import Path

from lockstep.errors import RunDirectoryError, UsageError
from lockstep.state.files import run_file
from lockstep.state.files.lock import in_use
from lockstep.state.record.reading import Event, LineReader, RunRecords, describe, values_of
from lockstep.tools.watch.view import EventLine, RankView, RunView

_LINES, _MOMENTS = 200, 500
#: Number of bytes at the end of a long file that the first read takes.
_MOST = 1 << 20
#: Escape sequences and control characters of terminals.
_ESCAPES = re.compile(
    r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


class Watcher:
    """Reads the state of a run from its run directory; each call of `look` reads only new content.

    Raises:
        UsageError: if the directory does not exist.
        RunDirectoryError: if the directory has no readable record of a run.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        if not directory.is_dir():
            raise UsageError(f"there is no directory {directory}; expected that of a run")
        self._directory = directory
        self._log = LineReader(directory / "logs" / f"rank-{rank}.log", most=_MOST)
        self._events: dict[Path, LineReader] = {}
        self._ranks: dict[int, RankView] = {}
        self._moments: deque[EventLine] = deque(maxlen=_MOMENTS)
        self._lines: deque[str] = deque(maxlen=_LINES)
        RunRecords.of(directory)

    def look(self) -> RunView:
        """Read the new content of the run directory; return the present state of the run.

        Raises:
            RunDirectoryError: if the record of the run can no longer be read.
        """
        # In this order: a run records its end before it releases its lock.
        used = in_use(self._directory)
        content = RunRecords.of(self._directory).run
        files = sorted((self._directory / "events").glob("*.jsonl"))
        found = [one for file in files for one in self._new(file)]
        self._moments.extend(sorted(found, key=lambda moment: moment.time))
        with contextlib.suppress(FileNotFoundError):  # it may come later
            lines = (plain(line.decode(errors="replace")) for line in self._log.lines())
            self._lines.extend(filter(None, lines))
        generations = content.get("generations") or [{}]
        ranks = range(generations[-1].get("ranks", 1))
        return RunView(
            directory=str(self._directory),
            content=content,
            ranks={rank: self._ranks.get(rank, RankView()) for rank in ranks},
            moments=tuple(self._moments),
            lines=tuple(self._lines),
            time=time.time(),
            in_use=used,
        )

    def _new(self, file: Path) -> list[EventLine]:
        """Read the new events of a rank or launcher in `file`; return the lines to show."""
        events = self._events.setdefault(file, LineReader(file, most=_MOST)).events()
        kind, _, number = file.stem.partition("-")
        if kind == "launcher":
            return [moment for event in events if (moment := _moment(event))]
        if kind != "rank" or not number.isdigit():
            return []
        rank = self._ranks.setdefault(int(number), RankView())
        return [moment for event in events if (moment := _of_rank(rank, int(number), event))]


def _of_rank(rank: RankView, number: int, event: Event) -> EventLine | None:
    kind = event["kind"]
    if kind == "start":
        rank.newest.clear()
        if not event["step"]:
            rank.values.clear()
    rank.newest[kind], rank.time = event, event["time"]
    if kind == "log":
        rank.values |= dict(values_of(event))
    if kind == "start" and number == 0 and event["step"]:
        text = f"resumed after step {event['step']} on {event['ranks']} ranks"
        return EventLine(event["time"], text)
    return _moment(event)


def _moment(event: Event) -> EventLine | None:
    text = describe(event)
    if text is None:
        return None
    return EventLine(event["time"], plain(text), is_bad=event["kind"] == "failure")


def plain(line: str) -> str:
    """Return the text that a terminal shows for a line of output, without escape sequences.

    Only the part after the last carriage return is shown.
    """
    return _ESCAPES.sub("", line.rstrip("\r\n").rpartition("\r")[2]).expandtabs().rstrip()


def newest(base: Path) -> Path:
    """Return the directory of the run below `base` that was started or restarted last.

    Raises:
        UsageError: if there is no run in `base`.
    """
    # Later runs of a script have their directories below that of its first run.
    files = [*base.glob(f"*/*/{run_file.NAME}"), *base.glob(f"*/*/*/{run_file.NAME}")]
    if not files:
        raise UsageError(
            f"there is no run in {base}; expected {base}/NAME/TIME with a {run_file.NAME}",
            hint="name the run directory: lockstep watch RUN_DIR",
        )
    return max((file.parent for file in files), key=_began)


def _began(directory: Path) -> float:
    try:
        generations = (run_file.read(directory) or {}).get("generations") or [{}]
    except RunDirectoryError:
        return 0.0
    return float(generations[-1].get("time", 0.0))
