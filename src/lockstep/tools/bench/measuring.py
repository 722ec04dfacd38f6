"""Measurements of one run, computed from its recorded events."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.state.record.reading import Recorded

Event = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Where the time of a step goes, in seconds."""

    compute: float
    exchange: float | None  # `None` where it is not measured apart
    data: float

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + (self.exchange or 0.0) + self.data


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One run. Of steps, the first of each generation is left out: it warms up."""

    steps: int
    batch: float  # samples of a step, of all ranks
    step_seconds: float  # mean
    slowest_step: float
    split: Split  # of the rank that waits least in the exchange: the others wait for it
    exchange_share: float | None  # mean over ranks; `None` where not measured
    data_share: float  # mean over ranks
    sent: float | None = None  # bytes per step and rank; `None` where not counted
    gradients: int | None = None  # bytes of the gradients on the main rank
    host: dict[int, int] = field(default_factory=dict)  # peak of resident bytes, by rank
    device: dict[int, int] = field(default_factory=dict)  # peak of bytes on the GPU, by rank
    cpu: float | None = None  # cores that a rank uses, mean over ranks
    busy: float | None = None  # utilisation of the GPUs, 0 to 1, mean over ranks
    start_seconds: float | None = None  # from the command to the end of the first step
    devices: Sequence[str] = ()
    strategy: str | None = None
    exchange: str | None = None


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank's windows after the warm-up, added up."""

    steps: int
    samples: int
    seconds: float
    data: float
    exchange: float | None
    slowest: float

    @staticmethod
    def of(events: Iterable[Event], *, alone: bool) -> _Rank:
        """Add up a rank's windows; one that is `alone` has no exchange."""
        windows = [one for one in _windows(events) if one["steps"]]
        waits = [0.0 if alone else one["exchange"] for one in windows]
        return _Rank(
            steps=sum(one["steps"] for one in windows),
            samples=sum(one["samples"] for one in windows),
            seconds=sum(one["seconds"] for one in windows),
            data=sum(one["data"] for one in windows),
            exchange=None if None in waits else sum(waits),
            slowest=max((one["slowest"] for one in windows), default=0.0),
        )


def measure(recorded: Recorded, launched: float) -> Measured | None:
    """Return what a run did; `None` if nothing is left of it after the warm-up.

    `launched` is the time of the launch in Unix seconds.
    """
    alone = len(recorded.ranks) == 1
    ranks = {
        number: _Rank.of(events, alone=alone) for number, events in sorted(recorded.ranks.items())
    }
    if 0 not in ranks or not all(rank.steps for rank in ranks.values()):
        return None
    main, all_steps = ranks[0], _last_step(recorded.ranks[0])
    waits = [rank.exchange for rank in ranks.values()]
    shares = [rank.exchange / rank.seconds for rank in ranks.values() if rank.exchange is not None]
    critical = min(ranks.values(), key=lambda rank: (rank.exchange or 0.0) / rank.steps)
    traffic = [one for one in _all(recorded, "traffic") if "sent" in one]
    starts = _all(recorded, "start")
    return Measured(
        steps=main.steps,
        batch=main.samples / main.steps,
        step_seconds=main.seconds / main.steps,
        slowest_step=max(rank.slowest for rank in ranks.values()),
        split=_split(critical),
        exchange_share=None if None in waits else statistics.fmean(shares),
        data_share=statistics.fmean(rank.data / rank.seconds for rank in ranks.values()),
        sent=_per_step(traffic, all_steps * len(ranks)),
        gradients=next((one.get("gradients") for one in _of(recorded.ranks[0], "memory")), None),
        host=_peaks(recorded, "host"),
        device=_peaks(recorded, "device"),
        cpu=_mean(one["cpu"] for one in _samples(recorded)),
        busy=_mean(one["busy"] for one in _samples(recorded)),
        start_seconds=_first_step(recorded, 0, launched),
        devices=sorted({one["device_name"] or one["device"] for one in starts}),
        strategy=starts[0].get("strategy"),
        exchange=starts[0].get("exchange"),
    )


def restart_seconds(recorded: Recorded) -> float | None:
    """Return the time from the launcher's note of the first failure to the end of the next step."""
    launchers = recorded.launchers.values()
    failures = [one["time"] for events in launchers for one in _of(events, "failure")]
    return _first_step(recorded, 1, min(failures)) if failures else None


def _split(rank: _Rank) -> Split:
    exchange = None if rank.exchange is None else rank.exchange / rank.steps
    data = rank.data / rank.steps
    compute = rank.seconds / rank.steps - (exchange or 0.0) - data
    return Split(compute=max(0.0, compute), exchange=exchange, data=data)


def _of(events: Iterable[Event], kind: str) -> list[Event]:
    return [event for event in events if event["kind"] == kind]


def _all(recorded: Recorded, kind: str) -> list[Event]:
    return [event for events in recorded.ranks.values() for event in _of(events, kind)]


def _generations(events: Iterable[Event]) -> list[list[Event]]:
    """Cut a rank's events where a generation starts."""
    parts: list[list[Event]] = [[]]
    for event in events:
        if event["kind"] == "start" and parts[-1]:
            parts.append([])
        parts[-1].append(event)
    return parts


def _windows(events: Iterable[Event]) -> list[Event]:
    """Return the windows of steps without the first of each generation."""
    return [window for part in _generations(events) for window in _of(part, "pace")[1:]]


def _first_step(recorded: Recorded, generation: int, since: float) -> float | None:
    """Return the seconds until the main rank has done the first step of a generation."""
    parts = _generations(recorded.ranks.get(0, []))
    paces = _of(parts[generation], "pace") if generation < len(parts) else []
    return paces[0]["time"] - since if paces else None


def _last_step(events: Iterable[Event]) -> int:
    return max((event["step"] for event in _of(events, "pace")), default=0)


def _per_step(traffic: Sequence[Event], steps: int) -> float | None:
    """Return the bytes sent per step and rank; `steps` are those of all ranks together."""
    return sum(one["sent"] for one in traffic) / steps if traffic and steps else None


def _peaks(recorded: Recorded, kind: str) -> dict[int, int]:
    """Return each rank's peak of memory: as it says itself at its end, else as it was sampled."""
    peaks = {}
    for rank, events in recorded.ranks.items():
        said = [one[f"peak_{kind}"] for one in _of(events, "memory") if f"peak_{kind}" in one]
        sampled = [one[kind] for one in _of(events, "machine") if one[kind] is not None]
        if said or sampled:
            peaks[rank] = max(said or sampled)
    return dict(sorted(peaks.items()))


def _samples(recorded: Recorded) -> list[Event]:
    """Return what the machine did while ranks were past their first step."""
    return [
        event
        for events in recorded.ranks.values()
        for part in _generations(events)
        for event in _of(part, "machine")
        if event["step"] > _first(part)
    ]


def _first(part: Sequence[Event]) -> int:
    return next((event["step"] for event in _of(part, "pace")), 0)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
