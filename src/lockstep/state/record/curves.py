"""Turn logged values into curves, one value per step; a step computed twice has its later value."""

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
    """Divide the events of one rank into generations: one for each start and restart of the rank."""
    found: list[Generation] = []
    for event in events:
        if event["kind"] == "start" or not found:
            found.append(Generation(event.get("step", 0), event["time"]))
        found[-1].events.append(event)
    return found


def without_superseded(ranks: Mapping[int, Sequence[Event]]) -> dict[int, list[Event]]:
    """Return the events of each rank, without events of steps that were computed again after a restart.

    `ranks` are the events by rank. If the run restarts after step k, events from before the restart are
    left out if their step is above k. Restarts are read from the events of the lowest rank, since other
    ranks may not exist after a restart with fewer ranks.
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
    """Return the index in `generations` of the generation that is most likely the same as `own`.

    `generations` are those of the lowest rank, and `own` is one of another rank. It is the generation that
    begins at the same step and the nearest time, since clocks of machines differ a little.
    """

    def distance(k: int) -> tuple[bool, float]:
        return generations[k].step != own.step, abs(generations[k].time - own.time)

    return min(range(len(generations)), key=distance)


def curves(ranks: Mapping[int, Sequence[Event]]) -> dict[str, dict[int, float]]:
    """Return curves by the name of the logged number; a curve has its value at each step.

    `ranks`: events of each rank. Values are weighted means over replicas; outside of a loop over a loader,
    those of the lowest rank. Of a step computed again, only the last values count.
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
