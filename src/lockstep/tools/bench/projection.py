"""Model of the step time on other numbers of ranks, fitted to measured points.

    step(N) = overhead + compute · s + data · s + latency · m + bytes / bandwidth

`s` is the largest number of samples of a rank; `m` and `bytes` are the messages and bytes that a rank
sends. Each message takes a latency, and its bytes take their number divided by the bandwidth (Hockney 1994,
the alpha-beta model).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations

import numpy as np

from lockstep.engine.layout.replicas import block
from lockstep.registry import EXCHANGES, STRATEGIES

#: Relative difference up to which batch sizes count as equal: the last batch of an epoch may be short.
_ALIKE = 0.02
#: Improvement that one more factor of a fit must bring, as a share of the squared targets.
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
SHARDED = STRATEGIES.where(lambda one: one.shards)
AT_SERVERS = EXCHANGES.where(lambda one: one.at_servers)
#: Bytes of DistributedDataParallel's first bucket of gradients, and of its other buckets.
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20


@dataclass(frozen=True, slots=True)
class Cost:
    """Messages and bytes per step of one script, for one way to sum gradients over ranks.

    Without parameter servers these are as many as those of a ring all-reduce of each bucket of gradients.
    """

    exchange: str
    volume: float  # bytes that a rank sends in a step, divided by 2 (N - 1) / N
    sums: float  # sums in a step

    def messages(self, ranks: int) -> float:
        """Return the number of messages that a rank sends in a step."""
        if self.exchange in AT_SERVERS:
            return 2 * self.sums if ranks > 1 else 0
        return 2 * (ranks - 1) * self.sums

    def sent(self, ranks: int) -> float:
        """Return the number of bytes on the busiest link in a step, in one direction.

        With parameter servers this is a server's link, which carries the gradients of every rank.
        """
        if self.exchange in AT_SERVERS:
            return self.volume * ranks if ranks > 1 else 0
        return 2 * (ranks - 1) / ranks * self.volume


def cost_of(
    exchange: str,
    strategy: str | None,
    *,
    sent: tuple[int, float] | None,
    gradients: float | None,
) -> Cost | None:
    """Return the messages and bytes of an exchange of gradients; `None` if the bytes are not known.

    `sent` is a number of ranks, and the bytes that each of these sent in a step. `gradients` is the size of
    all gradients in bytes.
    """
    if sent is not None and exchange in AT_SERVERS:
        volume = sent[1]
    elif sent is not None and exchange != "shared-memory":
        volume = sent[1] * sent[0] / (2 * (sent[0] - 1))
    else:  # the traffic of shared memory counts bytes written, which differ from a ring's
        factor = _OF_SHARDED if strategy in SHARDED else _OF_GRADIENTS.get(exchange)
        if factor is None or gradients is None:
            return None
        volume = factor * gradients
    buckets = 1.0 + max(0.0, -((_FIRST_BUCKET - (gradients or volume)) // _BUCKET))
    return Cost(exchange, volume, buckets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The measured step time on one number of ranks, to which the model is fitted."""

    ranks: int
    batch: float  # samples of a step, of all ranks
    replicas: int
    step: float  # seconds
    data: float  # seconds of the step that ranks wait for their loaders
    exchange: float | None  # seconds of the step; `None` if not measured separately
    left_out: str = ""  # why the fit does not use this point; empty if it does


Part = Callable[[Point], float]


@dataclass(frozen=True, slots=True)
class Link:
    """Bandwidth and latency between ranks, as given by the user; `None`: fitted to the measurements."""

    bandwidth: float | None = None  # bytes per second
    latency: float | None = None  # seconds per message


@dataclass(frozen=True, slots=True)
class Batches:
    """The number of samples of a step and of each rank, for any number of ranks."""

    total: float  # samples of a step: of all ranks, or of each rank if `per_rank`
    per_rank: bool  # whether the batch grows with the number of ranks
    replicas: int | None  # `None` if there are as many as ranks

    @staticmethod
    def of(points: Sequence[Point]) -> Batches | None:
        """Return the batch size, in total or per rank, that all points have; `None` if both differ."""
        fixed = {point.replicas for point in points if point.replicas != point.ranks}
        replicas = fixed.pop() if len(fixed) == 1 else None
        for per_rank in (False, True):
            each = [point.batch / (point.ranks if per_rank else 1) for point in points]
            if max(each) <= min(each) * (1 + _ALIKE):
                return Batches(max(each), per_rank, replicas)
        return None

    def samples(self, ranks: int) -> float:
        """Return the number of samples of a step, of all ranks."""
        return self.total * (ranks if self.per_rank else 1)

    def largest(self, ranks: int) -> float:
        """Return the mean number of samples per step on the rank with the most samples; at least 1."""
        share = 1 / ranks
        if self.replicas is not None and self.replicas >= ranks:
            share = len(block(self.replicas, ranks, 0)) / self.replicas
        return max(1.0, self.samples(ranks) * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Parameters of the model of the step time: fitted, or for the network given by the user."""

    overhead_seconds: float = 0.0  # of a step with any number of samples
    compute_seconds_per_sample: float = 0.0  # of a rank's own samples
    data_seconds_per_sample: float = 0.0  # of waiting for the loader
    latency_seconds: float = 0.0  # of a message
    seconds_per_byte: float = 0.0


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the step time for any number of ranks, fitted to measurements."""

    parameters: Parameters
    cost: Cost
    batches: Batches

    def over(self, link: Link) -> Model:
        """Return the model with the given bandwidth and latency in place of the fitted ones."""
        parameters, cost = self.parameters, self.cost
        if link.latency is not None:
            parameters = replace(parameters, latency_seconds=link.latency)
        if link.bandwidth is not None:
            parameters = replace(parameters, seconds_per_byte=1 / link.bandwidth)
        if link != Link() and cost.exchange == "shared-memory":  # a link connects several hosts
            cost = replace(cost, exchange="tree")
        return Model(parameters, cost, self.batches)

    def compute(self, ranks: int) -> float:
        """Return the seconds of a step without the exchange of gradients and without waiting for data."""
        own = self.batches.largest(ranks) * self.parameters.compute_seconds_per_sample
        return self.parameters.overhead_seconds + own

    def data(self, ranks: int) -> float:
        """Return the seconds of each step in which ranks wait for their data loaders."""
        return self.batches.largest(ranks) * self.parameters.data_seconds_per_sample

    def exchange(self, ranks: int) -> float:
        """Return the seconds of each step that the exchange of gradients takes."""
        waits = self.cost.messages(ranks) * self.parameters.latency_seconds
        return waits + self.cost.sent(ranks) * self.parameters.seconds_per_byte

    def step(self, ranks: int) -> float:
        """Return the seconds of a whole step: computing, waiting for data, exchanging gradients."""
        return self.compute(ranks) + self.data(ranks) + self.exchange(ranks)

    def rate(self, ranks: int) -> float:
        """Return the samples per second of all ranks."""
        return self.batches.samples(ranks) / self.step(ranks)


def fit_model(points: Sequence[Point], cost: Cost, batches: Batches) -> Model:
    """Return the model that fits the points best; points marked `left_out` are not used.

    The error of each point is relative to its step time. If the time of the exchange was measured apart,
    latency and bandwidth are fitted to it, otherwise to the step time.
    """
    used = [point for point in points if not point.left_out]

    def fitted(points: Sequence[Point], part: Part, **columns: Part) -> dict[str, float]:
        scaled = {name: [take(one) / one.step for one in points] for name, take in columns.items()}
        return fit(scaled, [part(one) / one.step for one in points])

    def samples(point: Point) -> float:
        return batches.largest(point.ranks)

    compute: dict[str, Part] = {"compute_seconds_per_sample": samples}
    exchange: dict[str, Part] = {
        "seconds_per_byte": lambda point: cost.sent(point.ranks),
        "latency_seconds": lambda point: cost.messages(point.ranks),
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
    return Model(Parameters(**found), cost, batches)


def fit(columns: Mapping[str, Sequence[float]], targets: Sequence[float]) -> dict[str, float]:
    """Return, by least squares, the factor of each column so that columns times factors sum to `targets`.

    A factor that would be negative, or that the rows do not determine, is 0. Of two fits with the same
    error the one with fewer factors is taken, then the one with factors for earlier columns.
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
