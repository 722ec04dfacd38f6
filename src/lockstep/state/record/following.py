"""Follow the events of all ranks while they are written: one value per step, over all replicas.

Ranks log without waiting for each other. What they have logged lies in `events/`; the main rank reads it
there, so that no step waits for a logger, and a value is the mean over all replicas.
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
    """The events of one rank, as far as they have been read."""

    rank: int
    reader: LineReader
    done: float = 0.0  # the last step that the rank has completed
    #: values of steps that have not been returned: step, offset of the line, event
    pending: list[tuple[int, int, Event]] = field(default_factory=list)

    def read(self) -> None:
        """Take in the lines that have come."""
        for event in self.reader.events():
            self._take(event)

    def _take(self, event: Event) -> None:
        kind, step = event["kind"], int(event.get("step", 0))
        if kind == "start":
            # What an earlier generation did after this step is computed again.
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
        """How many bytes need not be read again."""
        return min((offset for _, offset, _ in self.pending), default=self.reader.offset)


class Follower:
    """Reads the events of a run's ranks, and returns the values of steps that all of them have completed.

    Steps that a generation computes again come again. `resumed` is the step after which this generation
    continues, `state` what `state` returned in an earlier one.
    """

    def __init__(self, directory: Path, ranks: int, resumed: int, state: dict[str, Any]) -> None:
        self._directory = directory / "events"
        self._ranks = ranks
        self._offsets = {int(k): int(v) for k, v in state.get("offsets", {}).items()}
        self._files: dict[int, _File] = {}
        self._open()
        for file in self._files.values():
            file.read()
            if file.rank >= ranks:  # of a generation that had more ranks: no more will come
                file.pending = [one for one in file.pending if one[0] <= resumed]
                file.done = math.inf
        self.unseen = 0  # ranks whose events lie on a disk that this one does not share

    def _open(self) -> None:
        for path in self._directory.glob("rank-*.jsonl"):
            rank = int(path.stem.removeprefix("rank-"))
            if rank not in self._files:
                self._files[rank] = _File(rank, LineReader(path, self._offsets.get(rank, 0)))

    def read(self, *, ended: bool = False) -> list[tuple[int, dict[str, float]]]:
        """Return the values of the steps completed since the last call, in order; of all when `ended`."""
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
        """Return where a later generation begins to read: after the lines whose values were returned."""
        return {"offsets": {str(file.rank): file.kept for file in self._files.values()}}
