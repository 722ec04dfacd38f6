"""Reading the traces of all ranks of a layout back as one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: Which microbatch: step, loader, epoch, round, batch, turn, replica.
Key = tuple[int, int, int, int, int, int, int]

#: Which loop over a loader: loader, epoch, round.
LoopKey = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Seen:
    """What one replica saw in a microbatch."""

    bits: str
    value: float
    samples: tuple[int, ...]


@dataclass(slots=True)
class Traces:
    """What all ranks of a layout saw and made.

    Attributes:
        microbatches: what each replica saw.
        digests: parameters after each step, by rank.
        lengths: number of samples of each loader that shows every sample once.
        complete: loops that went to the end of their data.
    """

    microbatches: dict[Key, Seen] = field(default_factory=dict)
    digests: dict[int, dict[int, str]] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    complete: set[LoopKey] = field(default_factory=set)

    @property
    def steps(self) -> list[int]:
        """Steps in which something was seen, in order."""
        return sorted({key[0] for key in self.microbatches} | set(self.digests))

    def of_step(self, step: int) -> dict[Key, Seen]:
        """Return what was seen in one step."""
        return {key: seen for key, seen in self.microbatches.items() if key[0] == step}


def read(directory: Path) -> Traces:
    """Return the traces in `directory`; empty where a layout wrote none."""
    traces = Traces()
    for path in sorted(directory.glob("rank-*.jsonl")):
        rank = int(path.stem.removeprefix("rank-"))
        for entry in _entries(path):
            _take(traces, rank, entry)
    return traces


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            # A killed rank may leave half a line at the end.
            if line.endswith("\n"):
                yield json.loads(line)


def _take(traces: Traces, rank: int, entry: dict[str, Any]) -> None:
    kind = entry["kind"]
    if kind == "microbatch":
        names = ("step", "loader", "epoch", "round", "batch", "turn", "replica")
        key: Any = tuple(entry[name] for name in names)
        traces.microbatches[key] = Seen(entry["loss"], entry["value"], tuple(entry["samples"]))
    elif kind == "step":
        traces.digests.setdefault(entry["step"], {})[rank] = entry["digest"]
    elif kind == "loader" and entry["exhaustive"] and entry["length"] is not None:
        traces.lengths[entry["loader"]] = entry["length"]
    elif kind == "loop" and entry["complete"]:
        traces.complete.add((entry["loader"], entry["epoch"], entry["round"]))
