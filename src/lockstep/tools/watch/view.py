"""Define `RunView`: the state of a run at one moment, with values computed from it for display."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lockstep.state.files.lock import status
from lockstep.state.record.reading import Event
from lockstep.tools.quantities import binary_size, counted

#: Seconds after which a recorded pace is too old to be shown.
_STALE = 10.0


@dataclass(slots=True)
class RankView:
    """The newest event of each kind, and the newest logged values, of one rank.

    When the rank restarts, its events are cleared. Its logged values are cleared only if the rank then
    begins at step 0.
    """

    newest: dict[str, Event] = field(default_factory=dict)  # the last event of each kind
    values: dict[str, float] = field(default_factory=dict)  # the newest logged values
    time: float = 0.0  # of the last event, in Unix seconds; 0 without events

    @property
    def step(self) -> int | None:
        """Number of the newest step among the rank's events; `None` if none is recorded."""
        steps = [event["step"] for event in self.newest.values() if "step" in event]
        return max(steps, default=None)

    def measured(self, kind: str, name: str) -> Any:
        """Return the field `name` of the rank's newest event of kind `kind`; `None` without one."""
        return self.newest.get(kind, {}).get(name)

    def share(self, name: str) -> float | None:
        """Return the share, from 0 to 1, of the time of the newest steps that `name` took.

        `name` is `data` (waiting for data) or `exchange`. Return `None` if it is not measured.
        """
        part, whole = self.measured("pace", name), self.measured("pace", "seconds")
        return part / whole if part is not None and whole else None


@dataclass(frozen=True, slots=True)
class EventLine:
    """One event of the run as a sentence to show, with its time."""

    time: float  # Unix seconds
    text: str
    is_bad: bool = False


@dataclass(frozen=True, slots=True)
class RunView:
    """The state of a run at one moment, with values computed from it for `lockstep watch`."""

    directory: str  # as the user wrote it
    content: Mapping[str, Any]  # of `run.json`
    ranks: Mapping[int, RankView]  # since the last (re)start
    moments: tuple[EventLine, ...]
    lines: tuple[str, ...]  # the last lines of a log
    time: float  # Unix seconds
    in_use: bool | None  # whether a launch uses the directory; `None` if not known

    @property
    def status(self) -> str:
        """Status of the run: `running`, `finished`, `failed`, `preempted` or `dead`.

        A run is `dead` if its record says `running`, and no launch uses the run directory.
        """
        return status(str(self.content.get("status")), self.in_use)

    @property
    def name(self) -> str:
        """Name of the run."""
        return str(self.content.get("identity", {}).get("name"))

    @property
    def layout(self) -> str:
        """Numbers of ranks and nodes, as text such as `8 ranks on 2 nodes`."""
        generations = self.content.get("generations") or [{}]
        ranks, nodes = generations[-1].get("ranks", 1), generations[-1].get("nodes", 1)
        return f"{counted(ranks, 'rank')} on {counted(nodes, 'node')}"

    @property
    def restarts(self) -> int:
        """Number of times that the run was restarted, after a failure or by the user."""
        return max(0, len(self.content.get("generations", [])) - 1)

    @property
    def step(self) -> int | None:
        """Number of steps that the run has done; `None` before the first one is recorded."""
        if "steps" in self.content:
            return int(self.content["steps"])
        steps = [rank.step for rank in self.ranks.values() if rank.step is not None]
        return max(steps, default=None)

    @property
    def pace(self) -> Event:
        """The newest event with step times, of the lowest rank that has one; else an empty dict."""
        return next((r.newest["pace"] for r in self.ranks.values() if "pace" in r.newest), {})

    @property
    def rate(self) -> float | None:
        """Samples per second of all ranks; `None` if the run is not running or the measurement is old."""
        pace = self.pace
        if not pace or not pace["seconds"] or self.status != "running":
            return None
        is_old = self.time - pace["time"] > max(_STALE, 3 * pace["slowest"])
        return None if is_old else float(pace["samples"] / pace["seconds"])

    @property
    def done(self) -> float | None:
        """The share of the run's epochs that is done, from 0 to 1; `None` if it is not known."""
        if self.content.get("status") == "finished":
            return 1.0
        epochs = self.pace.get("epochs")
        if not epochs:
            return None
        batches = self.pace.get("batches")
        part = self.pace.get("batch", 0) / batches if batches else 0.0
        return float(min((self.pace["epoch"] + part) / epochs, 1.0))

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the remaining epochs take at the newest step time, without evaluations.

        `None` if the number of epochs or batches is not known.
        """
        pace, done = self.pace, self.done
        if done is None or self.rate is None or not pace.get("batches"):
            return None
        return float((1 - done) * pace["epochs"] * pace["batches"] * pace["median"])

    @property
    def epoch(self) -> str | None:
        """The current epoch, as text such as `epoch 2/10`; `None` if none is recorded."""
        if "epoch" not in self.pace:
            return None
        epochs = self.pace.get("epochs")
        return f"epoch {self.pace['epoch'] + 1}" + (f"/{epochs}" if epochs else "")

    @property
    def values(self) -> dict[str, float]:
        """The newest logged values by name, of the lowest rank that has logged any."""
        return next((rank.values for rank in self.ranks.values() if rank.values), {})

    @property
    def end(self) -> str | None:
        """The digest of a finished run, or the reason for which a run failed or is dead; else `None`."""
        if self.status == "dead":
            return (
                "no process of this run is left; "
                f"the same command with --run-dir {self.directory} continues it"
            )
        # The main rank's error may be a consequence of a failure that the launcher has recorded.
        failures = [moment.text for moment in self.moments if moment.is_bad]
        cause = failures[-1] if failures else self.content.get("error")
        text = {"finished": self.content.get("digest"), "failed": cause}.get(self.status)
        return None if text is None else str(text).partition("\n")[0]

    @property
    def summary(self) -> str:
        """Status, step, logged values, speed and layout of the run in one line of text."""
        parts = [self.status, self.epoch, None if self.step is None else f"step {self.step}"]
        parts += [f"{name} {value:.4g}" for name, value in self.values.items()]
        parts.append(None if self.rate is None else f"{self.rate:,.0f} samples/s")
        parts.append(self.layout)
        memory = sum(rank.measured("machine", "host") or 0 for rank in self.ranks.values())
        parts.append(f"memory {binary_size(memory)}" if memory else None)
        parts.append(counted(self.restarts, "restart") if self.restarts else None)
        return "  ".join(part for part in parts if part)
