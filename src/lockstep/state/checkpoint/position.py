"""Position of a run in its epochs, loops and steps, in numbers that any layout can resume from.

A position is the way to it: the events that the script reaches when it starts again from its top, in
order. Whatever is over is short: of a phase its last epoch stays, of a loop its last batch, of a metric its
value. The last event of a level may be open: the position is inside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lockstep.engine.data.microbatch import Batching
from lockstep.errors import CheckpointError
from lockstep.state.checkpoint import state_codec

#: Tensors that values of metrics are made of, by the name under which the JSON refers to them.
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Counters:
    """What counts on while a script runs.

    Attributes:
        steps: updates.
        stretch: number of the stretch: another one for every epoch and every phase, part of all keys.
        loaders: loaders that the script has made.
        rounds: how many loops over each loader this stretch has seen: pairs of loader and count.
    """

    steps: int = 0
    stretch: int = 0
    loaders: int = 0
    rounds: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def parse(told: Mapping[str, Any]) -> Counters:
        """Read what `dataclasses.asdict` and JSON have made of it."""
        rounds = tuple((_count(loader), _count(count)) for loader, count in told["rounds"])
        steps, stretch, loaders = (_count(told[name]) for name in ("steps", "stretch", "loaders"))
        return Counters(steps, stretch, loaders, rounds)


@dataclass(slots=True, kw_only=True)
class LoopEvent:
    """A loop over a loader that updates parameters.

    Attributes:
        loader: number of the loader.
        stretch: which stretch of the run it belongs to.
        round: how many loops over this loader the stretch has seen before.
        batching: how it makes its batches.
        batches: how many global batches it is done with.
        steps: updates that the run had done then.
        last: number of the last batch that it has begun.
        before: updates that the run had done when that began.
        complete: whether it is over, by `break` for instance.
        losses: of the last batch, in the order of `run.backward`; only where there is one replica.
        events: in the last batch.
    """

    loader: int
    stretch: int
    round: int
    batching: Batching
    batches: int = 0
    steps: int = 0
    last: int = 0
    before: int = 0
    complete: bool = False
    losses: list[Any] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def key(self) -> tuple[int, int, int]:
        """Which loop it is."""
        return (self.loader, self.stretch, self.round)


@dataclass(slots=True, kw_only=True)
class MetricEvent:
    """A call of `run.mean`, `run.sum` or `run.gather`.

    Attributes:
        call: which of them.
        done: whether it has returned.
        value: what it returned, or has seen until now: numbers, tensors, and containers of them.
        key: where generators stood when it returned.
        after: the counters when it returned; while it is open, when it began.
        events: those that its items reach, while it is open.
    """

    call: str
    done: bool = False
    value: Any = None
    key: int | None = None
    after: Counters = Counters()
    events: list[Event] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class PhaseEvent:
    """A call of `run.epochs`.

    Attributes:
        epoch: its last epoch; `None` where it has none.
        begin: the counters when that epoch began.
        ended: whether that epoch is over.
        complete: whether the phase is.
        after: the counters when the epoch, or the phase, was over.
        events: of that epoch.
    """

    epoch: int | None = None
    begin: Counters = Counters()
    ended: bool = False
    complete: bool = False
    after: Counters = Counters()
    events: list[Event] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class SaveEvent:
    """A call of `run.save` outside of loops."""

    events: list[Event] = field(default_factory=list)


def _count(told: Any) -> int:
    if type(told) is not int or not 0 <= told < 1 << 64:
        raise ValueError(f"{told!r:.40} is no number of 64 bits")
    return told


def _count_or_none(told: Any) -> int | None:
    return None if told is None else _count(told)


def _batching(told: dict[str, Any]) -> Batching:
    names = ("batch_size", "samples", "count")  # earlier versions have no count
    numbers = {name: _count_or_none(told.get(name)) for name in names}
    if not (numbers["batch_size"] if numbers["count"] is None else numbers["count"]):
        raise ValueError("a batch of 0 samples")
    return Batching(**{**told, **numbers})


Event = LoopEvent | MetricEvent | PhaseEvent | SaveEvent
_KINDS: dict[str, type[Event]] = {
    "loop": LoopEvent,
    "metric": MetricEvent,
    "phase": PhaseEvent,
    "save": SaveEvent,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_PARSED: dict[str, Callable[[Any], Any]] = {
    "batching": _batching,
    "begin": Counters.parse,
    "after": Counters.parse,
    **dict.fromkeys(("loader", "stretch", "round", "batches", "steps", "last", "before"), _count),
    **dict.fromkeys(("epoch", "key"), _count_or_none),
    "losses": lambda told: [float(loss) for loss in told],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run stands: between two batches, between two epochs, or at a call of `run.save`.

    Attributes:
        points: how many such places the run has passed.
        counters: as they are there.
        events: the way there.
    """

    points: int = 0
    counters: Counters = Counters()
    events: Sequence[Event] = ()

    @property
    def steps(self) -> int:
        """How many updates have happened."""
        return self.counters.steps

    def as_json(self) -> tuple[dict[str, Any], Tensors]:
        """Return it as JSON has it, and the tensors that this refers to."""
        tensors: Tensors = {}
        events = [_told(event, tensors) for event in self.events]
        return {"points": self.points, "counters": asdict(self.counters), "events": events}, tensors

    @staticmethod
    def parse(
        told: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
    ) -> Position:
        """Read what `as_json` has made; without `tensors` it has no values of metrics that are tensors.

        Raises:
            CheckpointError: if it is no position, such as one of an earlier version.
        """
        try:
            events = [_parse(event, tensors or {}) for event in told["events"]]
            counters = Counters.parse(told["counters"])
            return Position(points=_count(told["points"]), counters=counters, events=events)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"a saved state does not say where the run was, as this version reads it ({error!r})",
                hint="continue with the version of Lockstep that wrote it; --fresh begins anew",
            ) from error


def _told(event: Event, tensors: Tensors) -> dict[str, Any]:
    told: dict[str, Any] = {"kind": _NAMES[type(event)]}
    for name in type(event).__slots__:
        value = getattr(event, name)
        if name == "events":
            told[name] = [_told(one, tensors) for one in value]
        elif name == "losses":
            told[name] = [float(loss) for loss in value]
        elif name == "value":
            told[name] = state_codec.encode(value, name, tensors)
        else:
            told[name] = asdict(value) if isinstance(value, Counters | Batching) else value
    return told


def _parse(told: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Event:
    fields: dict[str, Any] = {}
    for name, value in told.items():
        if name == "events":
            fields[name] = [_parse(one, tensors) for one in value]
        elif name == "value":
            fields[name] = state_codec.decode(value, tensors.get)
        elif name != "kind":
            fields[name] = _PARSED[name](value) if name in _PARSED else value
    return _KINDS[told["kind"]](**fields)
