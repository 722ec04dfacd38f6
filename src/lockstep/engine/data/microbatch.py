"""`Microbatch`, `Batching`, `Start` and `Observer`: types that loaders and the run have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple, Protocol

from lockstep.engine.layout.permutation import Indices


class LoopKey(NamedTuple):
    """Three numbers that together identify a loop over a loader; random seeds are derived from them."""

    loader: int  # number of the loader in the run, in order of creation
    epoch: int  # number that differs for every epoch and every call of `run.epochs`
    round: int  # number of earlier loops over this loader in the epoch


class Microbatch(NamedTuple):
    """One replica's share of the samples of a global batch."""

    loader: int  # as in `LoopKey`
    epoch: int  # as in `LoopKey`
    round: int  # as in `LoopKey`
    step: int  # number of the global batch in this loop
    replica: int  # number of the replica that computes the microbatch
    size: int  # number of its samples; 0 for a stand-in, which repeats one sample at weight 0
    total: int  # number of samples in the global batch
    first: bool  # whether it is this rank's first microbatch of the global batch
    last: bool  # whether it is this rank's last microbatch of the global batch
    indices: Indices  # dataset indices (or stream positions), shape `(max(size, 1),)`
    turn: int = 0  # number of earlier iterations over this global batch
    audit: bool = False  # whether it is the additional computation of an audit

    @property
    def weight(self) -> float:
        """Weight of the microbatch's mean loss in the global batch's mean loss: the share of samples."""
        return self.size / self.total

    @property
    def numbers(self) -> tuple[int, int, int, int, int]:
        """The numbers of loader, epoch, loop, batch and replica; random seeds are derived from them."""
        return self[:5]

    @property
    def loop(self) -> LoopKey:
        """The loop over a loader to which the microbatch belongs."""
        return LoopKey(*self[:3])

    @property
    def place(self) -> int:
        """64-bit number that identifies one iteration over a global batch, the same on all ranks."""
        loop = (self.loader & 0xFF) << 56 | (self.epoch & 0xFFFF) << 40 | (self.round & 0xFF) << 32
        return loop | (self.step & 0xFFFFFFF) << 4 | self.turn & 0xF


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """Settings of a loader that decide, together with the run's seed, which samples each batch has."""

    batch_size: int | None  # samples per global batch; `None` if a batch sampler makes the batches
    samples: int | None  # number of samples of a loop; `None` for a stream
    order: str  # `sequential`, `shuffled`, `stream`, or the sampler's class
    drop_last: bool  # whether a short last batch is left out
    #: a checksum of the indices and weights in torch's subsets and samplers when the loop begins;
    #: `None` without any, or in a state that an earlier version saved
    indices: str | None = None
    count: int | None = None  # length of the batch sampler; `None` without one

    @property
    def batches(self) -> int | None:
        """Number of global batches in a loop; `None` for an iterable dataset."""
        if self.samples is None or self.batch_size is None:
            return self.count
        full, rest = divmod(self.samples, self.batch_size)
        return full if self.drop_last or not rest else full + 1

    def differences(self, now: Batching) -> list[str]:
        """Return the settings that differ from those in `now`, as one line of text for each.

        This object has the recorded settings, such as those in a checkpoint.
        """
        values = asdict(now)
        return [
            f"{name}: {recorded!r} recorded, {values[name]!r} now"
            for name, recorded in asdict(self).items()
            if recorded != values[name]
            and (name != "indices" or None not in (recorded, values[name]))
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Where a loop over a loader starts; after a resume perhaps at a later global batch than batch 0."""

    key: LoopKey  # identifies the loop
    batch: int = 0  # first global batch that was not computed before the state was saved
    again: int | None = None  # the last batch that was computed before, if replay computes it again
    is_over: bool = False  # whether the loop had ended, so that only the batch `again` is computed
    loop: Any = None  # the observer's own object for the loop

    @property
    def first(self) -> int:
        """Number of the first global batch that the loop yields."""
        return self.batch if self.again is None else self.again


class Observer(Protocol):
    """Interface by which a loader reports its progress to the run, and asks what to do next.

    The run chooses, for example, the first batch, the microbatch to audit, and which microbatches the
    script gets. `Loop` implements the interface.
    """

    def loop_begins(self, loader: int, batching: Callable[[], Batching]) -> Start:
        """Begin a loop over loader number `loader`; return its first global batch as a `Start`.

        The first batch is later than batch 0 if a resumed run is in the middle of the loop. `batching`:
        function that returns the loader's settings. It is called after the run has loaded its state, since
        a sampler's length may depend on that state.
        """

    def batch_begins(self, start: Start, step: int, *, shown: bool) -> None:
        """Called before global batch number `step` of the loop `start`.

        `shown`: whether the script gets the batch as a `GlobalBatch`.
        """

    def audit_plan(self, start: Start) -> Callable[[int], int | None]:
        """Return a function that chooses the replica to audit in a global batch.

        The function is called with the number of the batch in the loop `start`. It returns the number of
        the replica whose microbatch is computed twice, or `None` for a batch without audit.
        """

    def takes(self, microbatch: Microbatch) -> bool:
        """Whether `microbatch` is passed to the script.

        It may be left out if it has no samples, or if it is an audit's extra computation of a microbatch.
        """

    def microbatch_begins(self, microbatch: Microbatch, data: Any) -> None:
        """Called before the loop's body computes `microbatch`.

        `data`: the collated samples that the loop's body gets.
        """

    def microbatch_ends(self, microbatch: Microbatch, *, left: bool = False) -> None:
        """Called when the loop's body has ended for `microbatch`.

        `left`: whether the body ended by `break` or an exception.
        """

    def pass_ends(self, microbatch: Microbatch, *, shown: bool) -> None:
        """Called after an iteration over a global batch.

        `microbatch`: the last microbatch of the iteration. `shown`: whether the script gets the batch as a
        `GlobalBatch`.
        """

    def batch_ends(self, start: Start) -> bool:
        """Called after all iterations over a global batch of the loop `start`.

        Returns whether the loop is to end with this batch.
        """

    def loop_ends(self, start: Start, step: int, *, early: bool) -> None:
        """Called when a loop ends; `early`: whether before its last batch, such as by `break`.

        `step`: number of the global batch in which the script left the loop, or, if the script computed
        that batch to its end, of the next one.
        """

    def fails(self, error: BaseException) -> None:
        """Called when a loop over a loader has raised `error`, which the script may still catch."""
