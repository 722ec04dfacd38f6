"""Turn logged values into curves, one value per step; of a step computed twice the later value counts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.state.record.reading import Event, Mean, values_of


@dataclass(slots=True)
class Generation:
    """The events of one rank from a start or restart to the next."""

    step: int  # steps that the run had done at the (re)start
    time: float  # of the (re)start, in Unix seconds
    events: list[Event] = field(default_factory=list)


def split_generations(events: Iterable[Event]) -> list[Generation]:
    """Return the events of one rank, divided at the (re)starts of the rank."""
    found: list[Generation] = []
    for event in events:
        if event["kind"] == "start" or not found:
            found.append(Generation(event.get("step", 0), event["time"]))
        found[-1].events.append(event)
    return found


def without_superseded(ranks: Mapping[int, Sequence[Event]]) -> dict[int, list[Event]]:
    """Return the events of each rank, without events of steps that were computed again after a restart.

    A restart resumes after some step. All earlier events of later steps are superseded, also those of ranks
    that do not exist after the restart. So the restarts of the lowest rank decide for all ranks.
    """
    of_rank = {rank: split_generations(events) for rank, events in ranks.items()}
    generations = of_rank[min(of_rank)] if of_rank else []
    last = [
        min((later.step for later in generations[k + 1 :]), default=math.inf)
        for k in range(len(generations))
    ]
    kept: dict[int, list[Event]] = {}
    for rank, found in of_rank.items():
        ends = [last[_nearest(generation, generations)] for generation in found]
        kept[rank] = [
            event
            for generation, end in zip(found, ends, strict=True)
            for event in generation.events
            if event["kind"] in ("start", "resume") or event.get("step", 0) <= end
        ]
    return kept


def _nearest(own: Generation, generations: Sequence[Generation]) -> int:
    """Return the index in `generations`, the lowest rank's (re)starts, that matches `own` of another rank.

    Matching (re)starts have the same step; their times differ a little, as the clocks of machines do.
    """

    def distance(k: int) -> tuple[bool, float]:
        return generations[k].step != own.step, abs(generations[k].time - own.time)

    return min(range(len(generations)), key=distance)


def curves(ranks: Mapping[int, Sequence[Event]]) -> dict[str, dict[int, float]]:
    """Return each logged number by step: the mean over replicas, weighted by their samples.

    Of steps that were computed again the last values count. Values logged outside of a loop are those of
    the lowest rank.
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
