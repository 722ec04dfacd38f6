"""`Microbatch`, and what a loop over a loader reports to the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

from lockstep.engine.layout.permutation import Indices


class Microbatch(NamedTuple):
    """One replica's share of a global batch.

    Attributes:
        loader: number of the loader in the run, in order of creation.
        epoch: the run's epoch.
        round: how many loops over this loader the epoch has seen before.
        step: number of the global batch in this loop.
        replica: whose share this is.
        size: number of samples that count; 0 for a stand-in, which repeats one sample at weight 0.
        total: number of samples in the global batch.
        first: whether it is this rank's first of the global batch.
        last: whether it is this rank's last of the global batch.
        indices: dataset indices (or stream positions) of the samples, shape `(max(size, 1),)`.
        turn: how many passes over this global batch went before.
        audit: whether it is computed once more, before all others, and thrown away.
    """

    loader: int
    epoch: int
    round: int
    step: int
    replica: int
    size: int
    total: int
    first: bool
    last: bool
    indices: Indices
    turn: int = 0
    audit: bool = False

    @property
    def weight(self) -> float:
        """Weight of its mean loss in the mean over the global batch."""
        return self.size / self.total

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        """Numbers that identify it in keys; none of them depends on the layout."""
        return self[:5]

    @property
    def loop(self) -> tuple[int, int, int]:
        """Which loop it belongs to: loader, epoch, round."""
        return self[:3]

    @property
    def place(self) -> int:
        """Which pass over which global batch this belongs to, in 64 bits: the same on all ranks."""
        loop = (self.loader & 0xFF) << 56 | (self.epoch & 0xFFFF) << 40 | (self.round & 0xFF) << 32
        return loop | (self.step & 0xFFFFFFF) << 4 | self.turn & 0xF


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """What decides which samples a batch of a given number holds, besides the run's seed.

    Attributes:
        batch_size: samples per global batch; `None` where a batch sampler makes the batches.
        samples: how many a loop goes through; `None` for a stream, whose length is not known.
        order: `sequential`, `shuffled`, `stream`, or the class of the sampler that draws it.
        drop_last: whether a short last batch is left out.
        indices: a checksum of those that torch's subsets and samplers hold when the loop begins, and of
            weights; `None` without any, or where a state of an earlier version does not say.
        count: length of the batch sampler that makes the batches; `None` without one.
    """

    batch_size: int | None
    samples: int | None
    order: str
    drop_last: bool
    indices: str | None = None
    count: int | None = None

    @property
    def batches(self) -> int | None:
        """How many global batches a loop has; `None` for a stream."""
        if self.samples is None or self.batch_size is None:
            return self.count
        full, rest = divmod(self.samples, self.batch_size)
        return full if self.drop_last or not rest else full + 1

    def differences(self, now: Batching) -> list[str]:
        """Return one line per value that is another one `now`."""
        values = asdict(now)
        return [
            f"{name}: {recorded!r} recorded, {values[name]!r} now"
            for name, recorded in asdict(self).items()
            if recorded != values[name]
            and (name != "indices" or None not in (recorded, values[name]))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a loop over a loader starts.

    Attributes:
        epoch: the run's epoch, part of the loop's keys.
        round: how many loops over this loader the epoch has seen before.
        batch: the first global batch; the run was done with those before it when its state was saved.
        again: the last batch that it was done with, if that is computed again before the others.
        is_over: whether there is nothing left of the loop besides.
        loop: the loop, as the observer knows it.
    """

    epoch: int
    round: int
    batch: int = 0
    again: int | None = None
    is_over: bool = False
    loop: Any = None

    @property
    def first(self) -> int:
        """The first global batch that the script sees."""
        return self.batch if self.again is None else self.again


class Observer(Protocol):
    """Receives the progress of loops over microbatches: the run's `Loop`."""

    def loop_begins(self, loader: int, batching: Callable[[], Batching]) -> Start:
        """Return where a loop over `loader` that begins now starts.

        `batching` says how it makes its batches; a sampler's length may be known only when the run has
        its state back, so that it is asked then.
        """

    def batch_begins(self, start: Start, step: int, *, shown: bool) -> None:
        """The script is about to see global batch `step` of a loop; `shown` to it as a whole."""

    def audit_plan(self, start: Start) -> Callable[[int], int | None]:
        """Return a function from the number of a global batch to the replica that is computed once more."""

    def takes(self, microbatch: Microbatch) -> bool:
        """Whether the loop's body sees a microbatch now, which may have no sample or be an audit's."""

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """The loop's body is about to see this microbatch."""

    def microbatch_ends(self, microbatch: Microbatch, *, left: bool = False) -> None:
        """The loop's body is done with this microbatch, or has `left` it by `break` or an exception."""

    def pass_ends(self, microbatch: Microbatch, *, shown: bool) -> None:
        """A pass over a global batch is over; `microbatch` was the last, seen or not."""

    def batch_ends(self, start: Start) -> bool:
        """The script is done with a global batch of a loop; return whether that was the last."""

    def loop_ends(self, start: Start, step: int, *, early: bool) -> None:
        """The loop is over in global batch `step`: early by `break`, or after the last one."""

    def fails(self, error: BaseException) -> None:
        """A loop or a pass has raised `error` to the script, which may catch it."""
