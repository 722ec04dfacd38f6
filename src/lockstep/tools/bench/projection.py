"""Model of the step time on other numbers of ranks, fitted to measured points.

    step(N) = overhead + compute · s + data · s + latency · m + bytes / bandwidth

s is the number of samples of the rank that has most of them, m the messages and bytes what a rank sends
(`cost.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lockstep.engine.layout.replicas import block
from lockstep.tools.bench.cost import Cost

#: By how much batches may differ that are taken for equal: the last of an epoch may be short.
_ALIKE = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A measured number of ranks."""

    ranks: int
    batch: float  # samples of a step, of all ranks
    replicas: int
    step: float  # seconds
    data: float  # seconds of it that ranks wait for their loaders
    exchange: float | None  # seconds of it; `None` where not measured apart
    left_out: str = ""  # why the fit leaves it out


@dataclass(frozen=True, slots=True)
class Link:
    """What is given of the link between ranks; the rest is fitted."""

    bandwidth: float | None = None  # bytes per second
    latency: float | None = None  # seconds per message


@dataclass(frozen=True, slots=True)
class Batches:
    """How many samples a rank has in a step."""

    total: float  # samples of a step: of all ranks, or with `per_rank` of each
    per_rank: bool  # whether a step grows with the ranks
    replicas: int | None  # `None` where they follow from the ranks

    @staticmethod
    def of(points: Sequence[Point]) -> Batches | None:
        """Return what the points have in common; `None` if it is neither of both."""
        fixed = {point.replicas for point in points if point.replicas != point.ranks}
        replicas = fixed.pop() if len(fixed) == 1 else None
        for per_rank in (False, True):
            each = [point.batch / (point.ranks if per_rank else 1) for point in points]
            if max(each) <= min(each) * (1 + _ALIKE):
                return Batches(max(each), per_rank, replicas)
        return None

    def samples(self, ranks: int) -> float:
        """Return the samples of a step, of all ranks."""
        return self.total * (ranks if self.per_rank else 1)

    def largest(self, ranks: int) -> float:
        """Return the samples of the rank that has most of them; at least one."""
        share = 1 / ranks
        if self.replicas is not None and self.replicas >= ranks:
            share = len(block(self.replicas, ranks, 0)) / self.replicas
        return max(1.0, self.samples(ranks) * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """What is fitted, or given of the link."""

    overhead_seconds: float
    compute_seconds_per_sample: float
    data_seconds_per_sample: float
    latency_seconds: float
    seconds_per_byte: float


@dataclass(frozen=True, slots=True)
class Model:
    """A fitted model."""

    parameters: Parameters
    cost: Cost
    batches: Batches

    def over(self, link: Link, cost: Cost) -> Model:
        """Return the model with what is given of a link in the place of what was fitted."""
        given = {"latency_seconds": link.latency}
        given["seconds_per_byte"] = None if link.bandwidth is None else 1 / link.bandwidth
        known = {name: value for name, value in given.items() if value is not None}
        return Model(replace(self.parameters, **known), cost, self.batches)

    def compute(self, ranks: int) -> float:
        """Return seconds of a step that are neither exchange nor data."""
        own = self.batches.largest(ranks) * self.parameters.compute_seconds_per_sample
        return self.parameters.overhead_seconds + own

    def data(self, ranks: int) -> float:
        """Return seconds of a step that ranks wait for their loaders."""
        return self.batches.largest(ranks) * self.parameters.data_seconds_per_sample

    def exchange(self, ranks: int) -> float:
        """Return seconds of a step in the exchange of gradients."""
        waits = self.cost.messages(ranks) * self.parameters.latency_seconds
        return waits + self.cost.sent(ranks) * self.parameters.seconds_per_byte

    def step(self, ranks: int) -> float:
        """Return seconds of a step."""
        return self.compute(ranks) + self.data(ranks) + self.exchange(ranks)

    def rate(self, ranks: int) -> float:
        """Return samples per second."""
        return self.batches.samples(ranks) / self.step(ranks)


def fit_model(points: Sequence[Point], cost: Cost, batches: Batches) -> Model:
    """Return the model that comes closest to the points which are not left out.

    Every point counts by how far the prediction is off as a share of its step. Where the exchange is
    measured apart, its cost is fitted to that; otherwise all is fitted to the step.
    """
    used = [point for point in points if not point.left_out]
    apart = all(point.exchange is not None for point in used)
    found = _fit_apart(used, cost, batches) if apart else _fit_together(used, cost, batches)
    found |= _relative({"data": [batches.largest(one.ranks) for one in used]}, used, "data")
    parameters = Parameters(
        overhead_seconds=found.get("overhead", 0.0),
        compute_seconds_per_sample=found["sample"],
        data_seconds_per_sample=found["data"],
        latency_seconds=found["latency"],
        seconds_per_byte=found["byte"],
    )
    return Model(parameters, cost, batches)


def _fit_apart(used: Sequence[Point], cost: Cost, batches: Batches) -> dict[str, float]:
    compute: dict[str, list[float]] = {
        "sample": [batches.largest(one.ranks) for one in used],
        "overhead": [1.0 for _ in used],
    }
    several = [one for one in used if one.ranks > 1]
    return _relative(compute, used, "compute") | _relative(
        _exchange_columns(several, cost), several, "exchange"
    )


def _fit_together(used: Sequence[Point], cost: Cost, batches: Batches) -> dict[str, float]:
    samples = {"sample": [batches.largest(one.ranks) for one in used]}
    return _relative(samples | _exchange_columns(used, cost), used, "together")


def _exchange_columns(points: Sequence[Point], cost: Cost) -> dict[str, list[float]]:
    return {
        "byte": [cost.sent(one.ranks) for one in points],
        "latency": [cost.messages(one.ranks) for one in points],
    }


def _relative(
    columns: Mapping[str, Sequence[float]], points: Sequence[Point], what: str
) -> dict[str, float]:
    """Fit a part of the step, every row divided by the whole step."""
    if not points:
        return dict.fromkeys(columns, 0.0)
    scaled = {
        name: [value / one.step for value, one in zip(values, points, strict=True)]
        for name, values in columns.items()
    }
    return fit(scaled, [_part(one, what) / one.step for one in points])


def _part(point: Point, what: str) -> float:
    exchange = point.exchange or 0.0
    parts = {"data": point.data, "exchange": exchange, "together": point.step - point.data}
    return parts.get(what, point.step - point.data - exchange)


Array = npt.NDArray[np.float64]

#: By how much a fit with one parameter more has to be better, as a share of the squared targets.
_WORTH = 1e-9


def fit(columns: Mapping[str, Sequence[float]], targets: Sequence[float]) -> dict[str, float]:
    """Return what each column is to be multiplied by so that their sum comes closest to `targets`.

    A parameter that would be negative, or that the rows cannot tell from others, is 0: of two choices
    that are as close the one with fewer parameters is taken, and then the one of the earlier columns.
    """
    names, wanted = list(columns), np.asarray(targets, dtype=np.float64)
    best: dict[str, float] = {}
    least = float(wanted @ wanted)
    worth = _WORTH * least
    for count in range(1, len(names) + 1):
        for chosen in itertools.combinations(names, count):
            found = _solve([columns[name] for name in chosen], wanted)
            if found is not None and found[1] < least - worth:
                best, least = dict(zip(chosen, found[0], strict=True)), found[1]
    return {name: best.get(name, 0.0) for name in names}


def _solve(columns: Sequence[Sequence[float]], wanted: Array) -> tuple[list[float], float] | None:
    """Return a solution without negative parameters, and its squared error."""
    matrix = np.asarray(columns, dtype=np.float64).T
    # Columns may be bytes or seconds: scaled alike, their rank can be told.
    scale = np.abs(matrix).max(axis=0, initial=0.0)
    if not scale.all():
        return None
    solution, _, rank, _ = np.linalg.lstsq(matrix / scale, wanted, rcond=1e-9)
    if rank < len(columns) or (solution < 0).any():
        return None
    error = matrix / scale @ solution - wanted
    return (solution / scale).tolist(), float(error @ error)
