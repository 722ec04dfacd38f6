"""Compute speed, memory and other measurements of one run from the events that its ranks recorded."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lockstep.state.record.curves import split_generations
from lockstep.state.record.reading import Event, RunRecords


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurements:
    """Measurements of one run, without its warm-up: the first step after each (re)start."""

    steps: int
    batch: float  # samples of a step, of all ranks
    step_seconds: float  # mean
    slowest_step: float
    #: this time and the next two are of the rank that waits least in the exchange: the others wait for it
    compute_seconds: float
    exchange_seconds: float | None  # `None` where it is not measured apart
    data_seconds: float
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
    """Totals of one rank's steps, samples and seconds, without the warm-up after each (re)start."""

    steps: int
    samples: int
    seconds: float
    data: float
    exchange: float | None
    slowest: float

    @staticmethod
    def of(events: Iterable[Event], *, alone: bool) -> _Rank:
        """Return the totals of the steps that a rank recorded in `events`.

        `alone`: whether the run has only this rank; then the time of the exchange counts as 0 s.
        """
        # The first window after each (re)start is the warm-up.
        parts = [part.events for part in split_generations(events)]
        paces = [one for part in parts for one in _of(part, "pace")[1:]]
        windows = [one for one in paces if one["steps"]]
        waits = [0.0 if alone else one["exchange"] for one in windows]
        return _Rank(
            steps=sum(one["steps"] for one in windows),
            samples=sum(one["samples"] for one in windows),
            seconds=sum(one["seconds"] for one in windows),
            data=sum(one["data"] for one in windows),
            exchange=None if None in waits else sum(waits),
            slowest=max((one["slowest"] for one in windows), default=0.0),
        )


def measure(recorded: RunRecords, launched: float) -> Measurements | None:
    """Return the measurements of a run; `None` if it has no steps after the warm-up.

    `launched`: Unix time at which the run was launched.
    """
    alone = len(recorded.ranks) == 1
    ranks = {
        number: _Rank.of(events, alone=alone) for number, events in sorted(recorded.ranks.items())
    }
    if 0 not in ranks or not all(rank.steps for rank in ranks.values()):
        return None
    main = ranks[0]
    waits = [rank.exchange for rank in ranks.values()]
    shares = [rank.exchange / rank.seconds for rank in ranks.values() if rank.exchange is not None]
    critical = min(ranks.values(), key=lambda rank: (rank.exchange or 0.0) / rank.steps)
    waited = critical.exchange or 0.0
    steps = len(ranks) * max(one["step"] for one in _of(recorded.ranks[0], "pace"))
    traffic = [one for one in _all(recorded, "traffic") if "sent" in one]
    starts = _all(recorded, "start")
    return Measurements(
        steps=main.steps,
        batch=main.samples / main.steps,
        step_seconds=main.seconds / main.steps,
        slowest_step=max(rank.slowest for rank in ranks.values()),
        compute_seconds=max(0.0, critical.seconds - waited - critical.data) / critical.steps,
        exchange_seconds=None if critical.exchange is None else waited / critical.steps,
        data_seconds=critical.data / critical.steps,
        exchange_share=None if None in waits else statistics.fmean(shares),
        data_share=statistics.fmean(rank.data / rank.seconds for rank in ranks.values()),
        sent=sum(one["sent"] for one in traffic) / steps if traffic else None,
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


def restart_seconds(recorded: RunRecords) -> float | None:
    """Return the seconds from a run's first failure to the end of the first step after the restart.

    Return `None` if the run had no failure, or no step after the restart.
    """
    launchers = recorded.launchers.values()
    failures = [one["time"] for events in launchers for one in _of(events, "failure")]
    return _first_step(recorded, 1, min(failures)) if failures else None


def _of(events: Iterable[Event], kind: str) -> list[Event]:
    return [event for event in events if event["kind"] == kind]


def _all(recorded: RunRecords, kind: str) -> list[Event]:
    return [event for events in recorded.ranks.values() for event in _of(events, kind)]


def _first_step(recorded: RunRecords, generation: int, since: float) -> float | None:
    """Return the seconds from `since`, a Unix time, to the end of a generation's first step.

    The step is that of rank 0. `generation`: number of restarts before that step. Return `None` if there is
    no such step.
    """
    found = split_generations(recorded.ranks.get(0, []))[generation : generation + 1]
    paces = _of(found[0].events, "pace") if found else []
    return paces[0]["time"] - since if paces else None


def _peaks(recorded: RunRecords, kind: str) -> dict[int, int]:
    """Return each rank's peak memory in bytes: the recorded peak if there is one, else the largest sample.

    `kind` is `host` for resident memory, or `device` for memory of the GPU.
    """
    peaks = {}
    for rank, events in recorded.ranks.items():
        recorded_peaks = [
            one[f"peak_{kind}"] for one in _of(events, "memory") if f"peak_{kind}" in one
        ]
        sampled = [one[kind] for one in _of(events, "machine") if one[kind] is not None]
        if recorded_peaks or sampled:
            peaks[rank] = max(recorded_peaks or sampled)
    return dict(sorted(peaks.items()))


def _samples(recorded: RunRecords) -> list[Event]:
    """Return the recorded samples of CPU, memory and GPU use, without those up to a rank's first step.

    The first step after each restart is left out, too.
    """
    return [
        event
        for events in recorded.ranks.values()
        for generation in split_generations(events)
        for event in _of(generation.events, "machine")
        if event["step"] > next((one["step"] for one in _of(generation.events, "pace")), 0)
    ]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
