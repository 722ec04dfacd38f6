"""Follow the events of all ranks while they are written: one value per step, averaged over replicas.

Each rank writes its events to a file in `events/`, and the main rank reads all files. So ranks log without
waiting for each other, and a logged value is the mean over all replicas.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.state.record.reading import Event, LineReader, Mean, values_of


@dataclass(slots=True)
class _File:
    """One rank's event file, with logged values of steps that are not complete on all ranks."""

    rank: int
    reader: LineReader
    done: float = 0.0  # the last step that the rank has completed
    #: log events that have not been returned: step, offset of the line, event
    pending: list[tuple[int, int, Event]] = field(default_factory=list)

    def read(self) -> None:
        """Read the lines added to the file since the last call, and update `done` and `pending`."""
        for event in self.reader.events():
            self._take(event)

    def _take(self, event: Event) -> None:
        kind, step = event["kind"], int(event.get("step", 0))
        if kind == "start":
            # Steps after this one, from before the restart, are computed again.
            self.done = step
            self.pending = [one for one in self.pending if one[0] <= step]
        elif kind == "log":
            inside = event.get("replica") is not None
            self.done = max(self.done, step - inside)
            if inside or self.rank == 0:
                self.pending.append((step, self.reader.offset, event))
        elif kind == "pace":
            self.done = max(self.done, step)
        elif kind == "memory":  # the last event of a rank
            self.done = math.inf

    @property
    def kept(self) -> int:
        """Offset in the file at which to begin after a restart: that of the first event in `pending`."""
        return min((offset for _, offset, _ in self.pending), default=self.reader.offset)


class Follower:
    """Reads the event files of all ranks while they are written, and averages the values of `run.log`.

    A step is complete when all ranks have recorded it; `read` returns each complete step once, and again if
    the step is computed again after a restart.

    Args:
        directory: the run directory.
        ranks: number of ranks.
        resumed: the step after which this (re)start continues.
        state: result of the method `state` before the restart, or empty.
    """

    def __init__(self, directory: Path, ranks: int, resumed: int, state: dict[str, Any]) -> None:
        self._directory = directory / "events"
        self._ranks = ranks
        self._offsets = {int(k): int(v) for k, v in state.get("offsets", {}).items()}
        self._files: dict[int, _File] = {}
        self._open()
        for file in self._files.values():
            file.read()
            if file.rank >= ranks:  # it existed only before the restart: no more events will come
                file.pending = [one for one in file.pending if one[0] <= resumed]
                file.done = math.inf
        self.unseen = 0  # ranks whose events lie on a disk that this one does not share

    def _open(self) -> None:
        for path in self._directory.glob("rank-*.jsonl"):
            rank = int(path.stem.removeprefix("rank-"))
            if rank not in self._files:
                self._files[rank] = _File(rank, LineReader(path, self._offsets.get(rank, 0)))

    def read(self, *, ended: bool = False) -> list[tuple[int, dict[str, float]]]:
        """Return the steps completed since the last call, in order, each with its values by name.

        If the run has `ended`, steps that are not complete are returned, too.
        """
        if len(self._files) < self._ranks:
            self._open()
        for file in self._files.values():
            if file.rank < self._ranks:
                file.read()
        self.unseen = max(0, self._ranks - sum(rank < self._ranks for rank in self._files))
        done = math.inf if ended else min((file.done for file in self._files.values()), default=0)
        steps: dict[int, dict[str, Mean]] = defaultdict(lambda: defaultdict(Mean))
        for rank in sorted(self._files):
            file = self._files[rank]
            for step, _, event in file.pending:
                if step <= done:
                    for name, value in values_of(event):
                        steps[step][name].add(value, float(event.get("weight", 1.0)))
            file.pending = [one for one in file.pending if one[0] > done]
        return [
            (step, {name: mean.value for name, mean in steps[step].items()})
            for step in sorted(steps)
        ]

    def state(self) -> dict[str, Any]:
        """Return the offset in each file at which to read on after a restart, as JSON values."""
        return {"offsets": {str(file.rank): file.kept for file in self._files.values()}}
