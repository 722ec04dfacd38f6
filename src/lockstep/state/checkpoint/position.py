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
    """Numbers of a run that only grow."""

    steps: int = 0  # optimizer steps
    stretch: int = 0  # another one for every epoch and every phase, part of all keys
    loaders: int = 0  # loaders that the script has made
    rounds: tuple[tuple[int, int], ...] = ()  # loops in this stretch: pairs of loader and count

    @staticmethod
    def parse(content: Mapping[str, Any]) -> Counters:
        """Read them from JSON of `dataclasses.asdict`."""
        rounds = tuple((_count(loader), _count(count)) for loader, count in content["rounds"])
        steps, stretch, loaders = (
            _count(content[name]) for name in ("steps", "stretch", "loaders")
        )
        return Counters(steps, stretch, loaders, rounds)


@dataclass(slots=True, kw_only=True)
class LoopEvent:
    """A loop over a loader that updates parameters."""

    loader: int  # its number
    stretch: int
    round: int  # how many loops over this loader came before in the stretch
    batching: Batching
    batches: int = 0  # global batches that are done
    steps: int = 0  # optimizer steps of the run when they were
    last: int = 0  # number of the last batch that has begun
    before: int = 0  # optimizer steps of the run when it began
    complete: bool = False  # it is over, by `break` for instance
    #: of the last batch, in the order of `run.backward`; only where there is one replica
    losses: list[Any] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)  # in the last batch

    @property
    def key(self) -> tuple[int, int, int]:
        """Loader, stretch and round, which identify the loop."""
        return (self.loader, self.stretch, self.round)


@dataclass(slots=True, kw_only=True)
class MetricEvent:
    """A call of `run.mean`, `run.sum` or `run.gather`."""

    call: str  # which of them
    done: bool = False
    value: Any = None  # its result until now: numbers, tensors, and containers of them
    key: int | None = None  # of random generators when it returned
    after: Counters = Counters()  # when it returned; while it is open, when it began
    events: list[Event] = field(default_factory=list)  # that its items reach, while it is open


@dataclass(slots=True, kw_only=True)
class PhaseEvent:
    """A call of `run.epochs`."""

    epoch: int | None = None  # the last one; `None` where there is none
    begin: Counters = Counters()  # when that epoch began
    ended: bool = False  # that epoch is over
    complete: bool = False  # the phase is over
    after: Counters = Counters()  # when the epoch, or the phase, was over
    events: list[Event] = field(default_factory=list)  # of that epoch


@dataclass(slots=True, kw_only=True)
class SaveEvent:
    """A call of `run.save` outside of loops."""

    events: list[Event] = field(default_factory=list)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise ValueError(f"{value!r:.40} is no number of 64 bits")
    return value


def _count_or_none(value: Any) -> int | None:
    return None if value is None else _count(value)


def _batching(content: dict[str, Any]) -> Batching:
    names = ("batch_size", "samples", "count")  # earlier versions have no count
    numbers = {name: _count_or_none(content.get(name)) for name in names}
    if not (numbers["batch_size"] if numbers["count"] is None else numbers["count"]):
        raise ValueError("a batch of 0 samples")
    return Batching(**{**content, **numbers})


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
    "losses": lambda losses: [float(loss) for loss in losses],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A point of a run: between two batches, between two epochs, or at a call of `run.save`."""

    points: int = 0  # how many came before
    counters: Counters = Counters()
    events: Sequence[Event] = ()  # the way there

    @property
    def steps(self) -> int:
        """Number of optimizer steps."""
        return self.counters.steps

    def as_json(self) -> tuple[dict[str, Any], Tensors]:
        """Return it as JSON, and the tensors that the JSON refers to by name."""
        tensors: Tensors = {}
        events = [_as_json(event, tensors) for event in self.events]
        return {"points": self.points, "counters": asdict(self.counters), "events": events}, tensors

    @staticmethod
    def parse(
        content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
    ) -> Position:
        """Read the JSON of `as_json`; without `tensors` values of metrics that are tensors are missing.

        Raises:
            CheckpointError: if it is no position, such as one of an earlier version.
        """
        try:
            events = [_parse(event, tensors or {}) for event in content["events"]]
            counters = Counters.parse(content["counters"])
            return Position(points=_count(content["points"]), counters=counters, events=events)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"a saved state does not say where the run was, as this version reads it ({error!r})",
                hint="continue with the version of Lockstep that wrote it; --fresh begins anew",
            ) from error


def _as_json(event: Event, tensors: Tensors) -> dict[str, Any]:
    content: dict[str, Any] = {"kind": _NAMES[type(event)]}
    for name in type(event).__slots__:
        value = getattr(event, name)
        if name == "events":
            content[name] = [_as_json(inner, tensors) for inner in value]
        elif name == "losses":
            content[name] = [float(loss) for loss in value]
        elif name == "value":
            content[name] = state_codec.encode(value, name, tensors)
        else:
            content[name] = asdict(value) if isinstance(value, Counters | Batching) else value
    return content


def _parse(content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Event:
    fields: dict[str, Any] = {}
    for name, value in content.items():
        if name == "events":
            fields[name] = [_parse(inner, tensors) for inner in value]
        elif name == "value":
            fields[name] = state_codec.decode(value, tensors.get)
        elif name != "kind":
            fields[name] = _PARSED[name](value) if name in _PARSED else value
    return _KINDS[content["kind"]](**fields)
