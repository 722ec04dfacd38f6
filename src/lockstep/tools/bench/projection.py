"""Model of the step time on other layouts, fitted to measured points.

    step = overhead + compute · s + data · s + exchange
    exchange = local latency · m' + bytes' / local bandwidth + latency · m + bytes / bandwidth

`s` is the largest number of samples of a rank; `m` and `bytes` are messages and bytes between hosts, `m'`
and `bytes'` those within a host (`traffic.py`). Each message takes a latency, and its bytes take their
number divided by the bandwidth (Hockney 1994, the alpha-beta model).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

import numpy as np

from lockstep.engine.layout.replicas import block
from lockstep.tools.bench.traffic import (
    SHARDED,
    Layout,
    ReduceAlgorithm,
    Traffic,
    sent_by_rank,
    traffic,
    way_of,
)

#: Relative difference up to which batch sizes count as equal: the last batch of an epoch may be short.
_ALIKE = 0.02
#: Decrease of the squared error that one more factor of a fit must bring, as a share of the squares of
#: all targets.
_WORTH = 1e-9


#: Bytes exchanged per byte of gradients, for exchanges whose traffic is not recorded.
_OF_GRADIENTS = {
    "shared-memory": 1.0,
    "tree": 1.0,
    "native": 1.0,
    "mpi": 1.0,
    "bf16": 0.5,
    "fp16": 0.5,
}
#: Bytes exchanged per byte of gradients with FSDP2: half an all-reduce, and two gathers of parameters.
_OF_SHARDED = 1.5
#: Bytes of DistributedDataParallel's first bucket of gradients, and of its other buckets.
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20


@dataclass(frozen=True, slots=True)
class Cost:
    """How gradients are summed over ranks in one step: exchange, algorithm, number of sums, total bytes."""

    exchange: str
    volume: float  # bytes of all that is summed in a step
    sums: float  # sums in a step
    way: ReduceAlgorithm = ReduceAlgorithm.HOSTS

    def traffic(self, layout: Layout, replicas: int | None = None) -> Traffic:
        """Return the messages and bytes of a step on a layout.

        `replicas`: number of replicas of the run; `None` if there are as many as ranks.
        """
        return traffic(self.way, layout, replicas).times(self.sums, self.volume)


def cost_of(
    exchange: str,
    strategy: str | None,
    *,
    sent: tuple[Layout, float] | None,
    gradients: float | None,
    on_cpu: bool = True,
) -> Cost | None:
    """Return the `Cost` of summing gradients in one step; `None` if the bytes are not known.

    `sent`: a layout, and the bytes that each of its ranks sent in a step; `None` if they are not known.
    `gradients`: size of all gradients in bytes, or `None`. `on_cpu`: whether the ranks compute on CPUs.
    """
    way = way_of(exchange, strategy, on_cpu=on_cpu)
    is_sharded = strategy in SHARDED
    factor = _OF_SHARDED if is_sharded else _OF_GRADIENTS.get(exchange)
    if factor and gradients and (sent is None or not is_sharded):
        volume = factor * gradients
    elif sent is not None and exchange != "shared-memory":  # which counts the bytes written
        volume = sent[1] / sent_by_rank(way, sent[0])
    else:
        return None
    return Cost(exchange, volume, buckets_of(gradients or volume), way)


def buckets_of(gradients: float) -> float:
    """Return the number of buckets into which DistributedDataParallel divides `gradients` bytes."""
    return 1.0 + max(0.0, -((_FIRST_BUCKET - gradients) // _BUCKET))


@dataclass(frozen=True, slots=True, kw_only=True)
class FitPoint:
    """The measured step time on one layout, to which the model is fitted."""

    layout: Layout
    batch: float  # samples of a step, of all ranks
    replicas: int
    step: float  # seconds
    data: float  # seconds of the step that ranks wait for their loaders
    exchange: float | None  # seconds of the step; `None` if not measured separately
    left_out: str = ""  # why the fit does not use this point; empty if it does

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.layout.ranks


Part = Callable[[FitPoint], float]


@dataclass(frozen=True, slots=True)
class Link:
    """Bandwidths and latencies given by the user; those that are `None` are fitted to measurements.

    `bandwidth` and `latency` are those between hosts, the other two those between ranks of one host.
    """

    bandwidth: float | None = None  # bytes per second
    latency: float | None = None  # seconds per message
    local_bandwidth: float | None = None
    local_latency: float | None = None


@dataclass(frozen=True, slots=True)
class Batches:
    """The batch size of a run on any number of ranks: constant in total, or constant per rank."""

    total: float  # samples of a step: of all ranks, or of each rank if `per_rank`
    per_rank: bool  # whether the batch grows with the number of ranks
    replicas: int | None  # `None` if there are as many as ranks

    @staticmethod
    def of(points: Sequence[FitPoint]) -> Batches | None:
        """Return the batch size that all points share, in total or else per rank; `None` without one."""
        fixed = {point.replicas for point in points if point.replicas != point.ranks}
        replicas = fixed.pop() if len(fixed) == 1 else None
        for per_rank in (False, True):
            each = [point.batch / (point.ranks if per_rank else 1) for point in points]
            if max(each) <= min(each) * (1 + _ALIKE):
                return Batches(max(each), per_rank, replicas)
        return None

    def samples(self, ranks: int) -> float:
        """Return the number of samples per step on all of `ranks` ranks together."""
        return self.total * (ranks if self.per_rank else 1)

    def of_run(self, ranks: int) -> int:
        """Return the number of replicas of a run on `ranks` ranks: at least one for each rank."""
        return ranks if self.replicas is None else max(self.replicas, ranks)

    def largest(self, ranks: int) -> float:
        """Return the samples per step of the rank that has the most, on average over steps; at least 1.

        `ranks` is the number of ranks.
        """
        share = 1 / ranks
        if self.replicas is not None and self.replicas >= ranks:
            share = len(block(self.replicas, ranks, 0)) / self.replicas
        return max(1.0, self.samples(ranks) * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters of a step-time model: seconds per step, per sample, per message and per byte."""

    overhead_seconds: float = 0.0  # of a step with any number of samples
    compute_seconds_per_sample: float = 0.0  # of a rank's own samples
    data_seconds_per_sample: float = 0.0  # of waiting for the loader
    latency_seconds: float = 0.0  # of a message to another host
    seconds_per_byte: float = 0.0
    local_latency_seconds: float = 0.0  # of a message within a host
    local_seconds_per_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the step time for any layout, fitted to measurements or made of given numbers."""

    parameters: Parameters
    cost: Cost
    batches: Batches

    def over(self, link: Link) -> Model:
        """Return a copy of the model with the bandwidths and latencies of `link` instead of fitted ones.

        Values of `link` that are `None` change nothing.
        """
        given = {
            "latency_seconds": link.latency,
            "seconds_per_byte": link.bandwidth and 1 / link.bandwidth,
            "local_latency_seconds": link.local_latency,
            "local_seconds_per_byte": link.local_bandwidth and 1 / link.local_bandwidth,
        }
        known = {name: value for name, value in given.items() if value is not None}
        cost = self.cost
        if (link.bandwidth, link.latency) != (None, None) and cost.exchange == "shared-memory":
            cost = replace(cost, exchange="tree")  # a link connects several hosts
        return Model(replace(self.parameters, **known), cost, self.batches)

    def by(self, way: ReduceAlgorithm) -> Model:
        """Return a copy of the model in which the algorithm `way` sums gradients over ranks."""
        return replace(self, cost=replace(self.cost, way=way))

    def compute(self, ranks: int) -> float:
        """Return the seconds of a step without the exchange and without waiting for data.

        `ranks` is the number of ranks.
        """
        own = self.batches.largest(ranks) * self.parameters.compute_seconds_per_sample
        return self.parameters.overhead_seconds + own

    def data(self, ranks: int) -> float:
        """Return the seconds per step in which ranks wait for their data loaders.

        `ranks` is the number of ranks.
        """
        return self.batches.largest(ranks) * self.parameters.data_seconds_per_sample

    def exchange(self, layout: Layout) -> float:
        """Return the seconds per step that the exchange of gradients takes on `layout`."""
        made, known = self.cost.traffic(layout, self.batches.of_run(layout.ranks)), self.parameters
        between = (
            made.link_messages * known.latency_seconds + made.link_bytes * known.seconds_per_byte
        )
        local = made.local_messages * known.local_latency_seconds
        return between + local + made.local_bytes * known.local_seconds_per_byte

    def step(self, layout: Layout) -> float:
        """Return the seconds of a whole step on `layout`: computing, waiting for data, exchange."""
        return self.compute(layout.ranks) + self.data(layout.ranks) + self.exchange(layout)

    def rate(self, layout: Layout) -> float:
        """Return the samples per second of all ranks of `layout` together."""
        return self.batches.samples(layout.ranks) / self.step(layout)


def fit_model(points: Sequence[FitPoint], cost: Cost, batches: Batches) -> Model:
    """Fit a step-time model to the measured `points`; points with a reason in `left_out` are not used.

    The squared errors relative to each point's step time are minimized. If the time of the exchange was
    measured apart, latency and bandwidth are fitted to it, otherwise to the step time. `cost` and `batches`
    become part of the model.
    """
    used = [point for point in points if not point.left_out]

    def fitted(points: Sequence[FitPoint], part: Part, **columns: Part) -> dict[str, float]:
        scaled = {name: [take(one) / one.step for one in points] for name, take in columns.items()}
        return fit(scaled, [part(one) / one.step for one in points])

    def samples(point: FitPoint) -> float:
        return batches.largest(point.ranks)

    def moved(point: FitPoint) -> Traffic:
        return cost.traffic(point.layout, point.replicas)

    compute: dict[str, Part] = {"compute_seconds_per_sample": samples}
    exchange: dict[str, Part] = {
        "seconds_per_byte": lambda point: moved(point).link_bytes,
        "latency_seconds": lambda point: moved(point).link_messages,
        "local_seconds_per_byte": lambda point: moved(point).local_bytes,
        "local_latency_seconds": lambda point: moved(point).local_messages,
    }
    found = fitted(used, lambda point: point.data, data_seconds_per_sample=samples)
    if any(point.exchange is None for point in used):
        found |= fitted(used, lambda point: point.step - point.data, **compute, **exchange)
    else:
        compute["overhead_seconds"] = lambda _: 1.0
        several = [point for point in used if point.ranks > 1]
        found |= fitted(several, lambda point: point.exchange or 0.0, **exchange)
        found |= fitted(
            used, lambda point: point.step - point.data - (point.exchange or 0.0), **compute
        )
    if all(point.layout.hosts == 1 for point in used):  # the one speed that is known
        found["latency_seconds"] = found["local_latency_seconds"]
        found["seconds_per_byte"] = found["local_seconds_per_byte"]
    return Model(Parameters(**found), cost, batches)


def fit(columns: Mapping[str, Sequence[float]], targets: Sequence[float]) -> dict[str, float]:
    """Fit `targets` as a sum of columns, each times a factor of at least 0; return the factors.

    The sum of squared errors is minimal. The factor is 0 for a column that would get a negative one, or
    whose factor the numbers do not determine. Of two fits with the same error the one with fewer factors is
    taken, then the one with factors for earlier columns.
    """
    wanted = np.asarray(targets, dtype=np.float64)
    matrix = {name: np.asarray(column, dtype=np.float64) for name, column in columns.items()}
    # Columns may be bytes or seconds: they are scaled, so that the rank of the matrix can be computed.
    scales = {name: float(np.abs(column).max(initial=0.0)) for name, column in matrix.items()}
    best: dict[str, float] = {}
    least = float(wanted @ wanted)
    worth = _WORTH * least
    named = [name for name, scale in scales.items() if scale]
    for chosen in chain.from_iterable(combinations(named, n + 1) for n in range(len(named))):
        part = np.stack([matrix[name] / scales[name] for name in chosen], axis=1)
        factors, _, rank, _ = np.linalg.lstsq(part, wanted, rcond=1e-9)
        error = float(((part @ factors - wanted) ** 2).sum())
        if rank == len(chosen) and (factors >= 0).all() and error < least - worth:
            pairs = zip(chosen, factors.tolist(), strict=True)
            best, least = {name: factor / scales[name] for name, factor in pairs}, error
    return {name: best.get(name, 0.0) for name in columns}
