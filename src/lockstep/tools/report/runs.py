"""Read the records of the runs that a report shows, and choose labels for the runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lockstep.errors import RunDirectoryError, UsageError
from lockstep.state.files.lock import in_use, status
from lockstep.state.record.curves import Generation, curves, split_generations
from lockstep.state.record.reading import Event, RunRecords


@dataclass(frozen=True)
class ReportedRun:
    """A run in a report: its label, its records, and values computed from them."""

    label: str  # unique in the report
    recorded: RunRecords
    used: bool | None  # whether a launch uses the run directory; `None` if not known

    @property
    def identity(self) -> dict[str, Any]:
        """The identity in the run's record: everything that the run's result depends on."""
        return dict(self.recorded.run.get("identity", {}))

    @property
    def status(self) -> str:
        """Status of the run: `running`, `finished`, `failed`, `preempted` or `dead`.

        A run is `dead` if its record says `running`, and no launch uses the run directory.
        """
        return status(str(self.recorded.run.get("status")), self.used)

    @cached_property
    def launchers(self) -> list[Event]:
        """The recorded events of all launchers of the run, sorted by time."""
        found = [event for events in self.recorded.launchers.values() for event in events]
        return sorted(found, key=lambda event: float(event["time"]))

    @cached_property
    def began(self) -> float:
        """Time at which the first rank started, in Unix seconds."""
        return min(float(events[0]["time"]) for events in self.ranks.values())

    @cached_property
    def ended(self) -> float:
        """Time of the last event, in Unix seconds."""
        events = [*self.ranks.values(), self.launchers]
        return max(float(one[-1]["time"]) for one in events if one)

    @cached_property
    def ranks(self) -> dict[int, list[Event]]:
        """The events of each rank that has recorded any, by number of the rank."""
        return {rank: events for rank, events in self.recorded.ranks.items() if events}

    @cached_property
    def by_generation(self) -> dict[int, list[Generation]]:
        """For each rank, its events, divided into one `Generation` per start or restart."""
        return {rank: split_generations(events) for rank, events in self.ranks.items()}

    @cached_property
    def curves(self) -> dict[str, dict[int, float]]:
        """The numbers that the script logged: for each name, a dict from step to value."""
        return curves(self.ranks)


def read(directories: Sequence[Path]) -> list[ReportedRun]:
    """Read the records of the runs in `directories`; a repeated directory counts once.

    Raises:
        UsageError: if a directory does not exist.
        RunDirectoryError: if a directory has no readable record of a run, or no events.
    """
    found = list(dict.fromkeys(directories))
    for directory in found:
        if not directory.is_dir():
            raise UsageError(f"there is no directory {directory}; expected that of a run")
    shown = []
    for label, directory in zip(labels(found), found, strict=True):
        # In this order: a run records its end before it releases its lock.
        used = in_use(directory)
        run = ReportedRun(label, RunRecords.of(directory), used)
        shown.append(run)
        if not run.ranks:
            raise RunDirectoryError(
                f"{directory / 'events'} holds no events of a rank; expected some in rank-0.jsonl",
                hint="a run writes them from its beginning on: was the whole directory copied?",
            )
    return shown


def labels(directories: Sequence[Path]) -> list[str]:
    """Return a label for each directory: the end of its path, long enough to tell all of them apart."""
    paths = [directory.absolute() for directory in directories]
    for count in range(1, max((len(path.parts) for path in paths), default=1)):
        names = [str(Path(*path.parts[-count:])) for path in paths]
        if max(Counter(names).values(), default=1) == 1:
            return names
    return [str(path) for path in paths]
