"""The position of a run in epochs, loops and steps, in numbers that are the same on every layout.

A position is a list of events, in the order in which the script reaches them: loops over loaders, metrics,
phases (calls of `run.epochs`) and saves. These are not the events in the files `events/`. Little is stored
of an event that is over: the last epoch of a phase, the last batch of a loop, the value of a metric. The
last event may still be open, if the run is inside a loop, call or epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from lockstep.engine.data.microbatch import Batching, LoopKey
from lockstep.errors import CheckpointError
from lockstep.state.checkpoint import state_codec

#: Tensors in the values of metrics, by the names with which the JSON refers to them.
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Counters:
    """Counts of a run that only grow: optimizer steps, loaders, loops over each loader, and stretches."""

    steps: int = 0  # optimizer steps
    stretch: int = 0  # grows with every epoch and every phase; part of all keys of random streams
    loaders: int = 0  # loaders that the script has made
    rounds: tuple[tuple[int, int], ...] = ()  # loops in this stretch: pairs of loader and count

    @staticmethod
    def parse(content: Mapping[str, Any]) -> Counters:
        """Return the counters that are in `content`, a result of `dataclasses.asdict`."""
        rounds = tuple((_count(loader), _count(count)) for loader, count in content["rounds"])
        steps, stretch, loaders = (
            _count(content[name]) for name in ("steps", "stretch", "loaders")
        )
        return Counters(steps, stretch, loaders, rounds)


@dataclass(slots=True, kw_only=True)
class LoopEvent:
    """Progress of one training loop over a loader: how many batches and optimizer steps are done."""

    loader: int  # number of the loader in the script
    stretch: int
    round: int  # how many loops over this loader came before in the stretch
    batching: Batching
    batches: int = 0  # global batches that are done
    steps: int = 0  # optimizer steps of the run when these batches were done
    last: int = 0  # number of the last batch that has begun
    before: int = 0  # optimizer steps of the run when the last batch began
    complete: bool = False  # the loop is over, by `break` for instance
    #: losses of the last batch, in the order of `run.backward`; only if the run has one replica
    losses: list[Any] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)  # reached in the last batch

    @property
    def key(self) -> LoopKey:
        """Loader, stretch and round: three numbers that together identify the loop."""
        return LoopKey(self.loader, self.stretch, self.round)


@dataclass(slots=True, kw_only=True)
class MetricEvent:
    """A call of `run.mean`, `run.sum` or `run.gather`, with its result so far."""

    call: str  # `mean`, `sum` or `gather`
    done: bool = False
    value: Any = None  # the result so far: numbers, tensors, and containers of these
    key: int | None = None  # key of the random streams when the call returned
    after: Counters = Counters()  # when the call returned; while it is open, when it began
    events: list[Event] = field(default_factory=list)  # reached inside the call, while it is open


@dataclass(slots=True, kw_only=True)
class PhaseEvent:
    """Progress of one call of `run.epochs` (a phase): the newest epoch, and whether it has ended."""

    epoch: int | None = None  # the newest epoch that began; `None` before the first
    begin: Counters = Counters()  # when that epoch began
    ended: bool = False  # that epoch is over
    complete: bool = False  # the phase is over
    after: Counters = Counters()  # when the epoch, or the phase, was over
    events: list[Event] = field(default_factory=list)  # reached in that epoch


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
class SavedPosition:
    """Position of a run in its script, saved with its state: after a batch, an epoch or `run.save`."""

    points: int = 0  # number of such points before this one
    counters: Counters = Counters()
    events: Sequence[Event] = ()  # the events that the script reaches up to this point

    @property
    def steps(self) -> int:
        """Number of optimizer steps that the run has done at this position."""
        return self.counters.steps

    def as_json(self) -> tuple[dict[str, Any], Tensors]:
        """Return the position as JSON values, and the tensors that the JSON names, by name."""
        tensors: Tensors = {}
        events = [_as_json(event, tensors) for event in self.events]
        return {"points": self.points, "counters": asdict(self.counters), "events": events}, tensors

    @staticmethod
    def parse(
        content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor] | None = None
    ) -> SavedPosition:
        """Return the position in `content`, JSON values that `as_json` has returned.

        `tensors` are the tensors that `as_json` has returned. Each tensor that is missing becomes `None`.

        Raises:
            CheckpointError: if `content` is not a position of this version's format.
        """
        try:
            events = [_parse(event, tensors or {}) for event in content["events"]]
            counters = Counters.parse(content["counters"])
            return SavedPosition(points=_count(content["points"]), counters=counters, events=events)
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
