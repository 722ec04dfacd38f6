"""Logged values as curves with one value per step; steps after a restart replace earlier ones."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.state.record.reading import Event, Mean, values_of


@dataclass(slots=True)
class Life:
    """What one rank recorded in one generation."""

    step: int  # steps that were done when it began
    time: float  # Unix seconds
    events: list[Event] = field(default_factory=list)


def lives(events: Iterable[Event]) -> list[Life]:
    """Return the events of one rank, generation by generation."""
    found: list[Life] = []
    for event in events:
        if event["kind"] == "start" or not found:
            found.append(Life(event.get("step", 0), event["time"]))
        found[-1].events.append(event)
    return found


def without_superseded(ranks: Mapping[int, Sequence[Event]]) -> dict[int, list[Event]]:
    """Return the events of each rank without those whose steps were computed again later.

    A generation resumes after some step: what earlier ones recorded of later steps is superseded, also
    that of ranks which this generation lacks. So all ranks are held against the generations of the lowest.
    """
    of_rank = {rank: lives(events) for rank, events in ranks.items()}
    generations = of_rank[min(of_rank)] if of_rank else []
    last = [
        min((later.step for later in generations[k + 1 :]), default=math.inf)
        for k in range(len(generations))
    ]
    kept: dict[int, list[Event]] = {}
    for rank, found in of_rank.items():
        ends = [last[_nearest(life, generations)] for life in found]
        kept[rank] = [
            event
            for life, end in zip(found, ends, strict=True)
            for event in life.events
            if event["kind"] in ("start", "resume") or event.get("step", 0) <= end
        ]
    return kept


def _nearest(life: Life, generations: Sequence[Life]) -> int:
    """Return the generation that a life of another rank is part of: clocks of machines differ a little."""

    def distance(k: int) -> tuple[bool, float]:
        return generations[k].step != life.step, abs(generations[k].time - life.time)

    return min(range(len(generations)), key=distance)


def curves(ranks: Mapping[int, Sequence[Event]]) -> dict[str, dict[int, float]]:
    """Return each logged number by step: the mean over replicas, weighted by their samples.

    Steps that were computed again count as they were computed last.

    What is logged outside of a loop is that of the lowest rank.
    """
    means: defaultdict[str, defaultdict[int, Mean]] = defaultdict(lambda: defaultdict(Mean))
    main = min(ranks, default=0)
    for rank, events in without_superseded(ranks).items():
        for event in events:
            if event["kind"] == "log" and (rank == main or event.get("replica") is not None):
                for name, value in values_of(event):
                    means[name][event["step"]].add(value, event.get("weight", 1.0))
    return {
        name: {step: mean.value for step, mean in sorted(steps.items())}
        for name, steps in means.items()
    }
