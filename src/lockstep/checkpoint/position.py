"""Where a run stands, in numbers that mean the same on every layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.data.microbatch import Batching


@dataclass(frozen=True, slots=True)
class LoopPosition:
    """How far a loop over a loader has come that updates parameters.

    Attributes:
        loader: number of the loader.
        stretch: which stretch of the run it belongs to.
        round: how many loops over this loader the stretch has seen before.
        batches: how many global batches it is done with.
        steps: updates that the run had done then.
        complete: whether it is over, by `break` for instance.
        batching: how it makes its batches; `None` where a state of format 1 does not say.
    """

    loader: int
    stretch: int
    round: int
    batches: int = 0
    steps: int = 0
    complete: bool = False
    batching: Batching | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """Which loop it is."""
        return (self.loader, self.stretch, self.round)

    @staticmethod
    def parse(told: Mapping[str, Any]) -> LoopPosition:
        """Read what `Position.as_json` has made of it."""
        batching = told.get("batching")
        return LoopPosition(
            **{**told, "batching": None if batching is None else Batching(**batching)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run stands between two batches, or between two epochs.

    Attributes:
        steps: how many updates have happened.
        points: how many such places the run has passed.
        phase: how many times `run.epochs` was gone through before.
        epoch: number of the epoch in this phase; `None` outside of epochs.
        stretch: the stretch, which is part of the keys of loops.
        loaders: how many loaders the script had made when this epoch began.
        before: how many updates had happened then.
        rounds: how many loops over each loader this stretch has seen: pairs of loader and count.
        phases: for each phase that is over: the stretch after it, and the loaders and updates then.
        loops: loops that updated parameters: those outside of epochs, and those of this epoch.
    """

    steps: int = 0
    points: int = 0
    phase: int = 0
    epoch: int | None = None
    stretch: int = 0
    loaders: int = 0
    before: int = 0
    rounds: tuple[tuple[int, int], ...] = ()
    phases: tuple[tuple[int, int, int], ...] = ()
    loops: tuple[LoopPosition, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)

    @staticmethod
    def parse(told: Mapping[str, Any]) -> Position:
        """Read what `as_json` has made."""
        return Position(
            steps=int(told["steps"]),
            points=int(told["points"]),
            phase=int(told["phase"]),
            epoch=told["epoch"],
            stretch=int(told["stretch"]),
            rounds=tuple((int(loader), int(count)) for loader, count in told["rounds"]),
            loaders=int(told["loaders"]),
            before=int(told["before"]),
            phases=tuple((int(one), int(two), int(three)) for one, two, three in told["phases"]),
            loops=tuple(LoopPosition.parse(one) for one in told["loops"]),
        )
