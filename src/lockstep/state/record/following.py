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

from lockstep.state.record.reading import Mean, parse, values_of

#: Kinds of events with which a rank says that it has ended.
_LAST = frozenset({"memory"})


@dataclass(slots=True)
class _File:
    """The events of one rank, as far as they have been read.

    Attributes:
        rank: whose.
        path: where.
        offset: bytes that have been read.
        done: the last step that the rank is known to be through with.
        pending: values of steps that have not been given out: step, offset of the line, values.
    """

    rank: int
    path: Path
    offset: int = 0
    done: float = 0.0
    pending: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)

    def read(self) -> None:
        """Take in the lines that have come."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written
                event = parse(line)
                if event is not None:
                    self._take(event)
                self.offset += len(line)

    def _take(self, event: dict[str, Any]) -> None:
        kind, step = event.get("kind"), int(event.get("step", 0))
        if kind == "start":
            # What an earlier generation did after this step is computed again.
            self.done = step
            self.pending = [one for one in self.pending if one[0] <= step]
        elif kind == "log":
            inside = event.get("replica") is not None
            self.done = max(self.done, step - inside)
            if inside or self.rank == 0:
                self.pending.append((step, self.offset, event))
        elif kind == "pace":
            self.done = max(self.done, step)
        elif kind in _LAST:
            self.done = math.inf

    @property
    def kept(self) -> int:
        """How many bytes need not be read again."""
        return min((offset for _, offset, _ in self.pending), default=self.offset)


class Follower:
    """Reads the events of a run's ranks, and gives out the values of steps that all are through with.

    Steps that a generation computes again come again.

    Args:
        directory: the run directory.
        ranks: number of ranks.
        resumed: the step after which this generation continues; 0 for a new run.
        state: what `state` returned in an earlier generation.

    Attributes:
        unseen: ranks whose events lie on a disk that this one does not share.
    """

    def __init__(self, directory: Path, ranks: int, resumed: int, state: dict[str, Any]) -> None:
        self._directory = directory / "events"
        self._ranks = ranks
        self._offsets = {int(k): int(v) for k, v in state.get("offsets", {}).items()}
        self._files: dict[int, _File] = {}
        self._open()
        for file in self._files.values():
            file.read()
            if (
                file.rank >= ranks
            ):  # of a generation that had more ranks: it is done with what counts
                file.pending = [one for one in file.pending if one[0] <= resumed]
                file.done = math.inf
        self.unseen = 0

    def _open(self) -> None:
        for path in self._directory.glob("rank-*.jsonl"):
            rank = int(path.stem.removeprefix("rank-"))
            if rank not in self._files:
                self._files[rank] = _File(rank, path, self._offsets.get(rank, 0))

    def read(self, *, ended: bool = False) -> list[tuple[int, dict[str, float]]]:
        """Return the values of steps that have been completed, in their order.

        Args:
            ended: the run is over: there is nothing to wait for.
        """
        if len(self._files) < self._ranks:
            self._open()
        for file in self._files.values():
            if file.rank < self._ranks:
                file.read()
        self.unseen = max(0, self._ranks - sum(rank < self._ranks for rank in self._files))
        done = math.inf if ended else min((file.done for file in self._files.values()), default=0)
        return self._give(done)

    def _give(self, done: float) -> list[tuple[int, dict[str, float]]]:
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
        """Return what lets a later generation begin behind the lines whose values have been given out."""
        return {"offsets": {str(file.rank): file.kept for file in self._files.values()}}
