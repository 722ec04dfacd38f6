"""Where a run stands: epochs, loops over loaders, microbatches, steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from lockstep.data.microbatch import Microbatch
from lockstep.data.randomness import set_key
from lockstep.errors import StepError
from lockstep.layout import keys
from lockstep.strategies.held import HeldModel


class Listener(Protocol):
    """Who is told of steps and loops: records and the watch over other ranks."""

    def step_ends(self, step: int, microbatch: Microbatch) -> None:
        """Step number `step` (counted from 1) has updated the parameters."""

    def loop_begins(self, loader: int, epoch: int, round_: int) -> None:
        """A loop over a loader begins."""

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """A loop's body is about to see a microbatch."""

    def loop_ends(self, loader: int, epoch: int, round_: int, step: int, *, early: bool) -> None:
        """A loop over a loader is over, in its global batch `step`."""


class Loop:
    """The state machine behind `for epoch in run.epochs(…): for batch in loader: …`.

    Args:
        seed: the run's seed.
        replicas: number of replicas in all.
        models: the models that the run holds; the run adds to it.
        listeners: who is told of steps and loops.

    Attributes:
        epoch: number of the running epoch.
        epochs: how many epochs were asked for.
        steps: how many updates have happened.
    """

    def __init__(
        self, seed: int, replicas: int, models: Sequence[HeldModel], listeners: Sequence[Listener]
    ) -> None:
        self._seed = seed
        self._replicas = replicas
        self._models = models
        self._listeners = listeners
        self._active: list[Microbatch] = []
        self._rounds: defaultdict[int, int] = defaultdict(int)
        self._stretch = 0
        self._updated = False
        self._passed: Microbatch | None = None
        self._closed = False
        self.epoch = 0
        self.epochs = 0
        self.steps = 0

    def run_epochs(self, count: int, epoch_ends: Callable[[int], None]) -> Iterator[int]:
        """Yield the epochs of the run."""
        self.epochs = count
        for epoch in range(count):
            self.epoch = epoch
            self._begin_stretch()
            yield epoch
            epoch_ends(epoch)

    def _begin_stretch(self) -> None:
        """Give loops from here on other keys than all before: another epoch, or another phase."""
        if self._rounds:
            self._stretch += 1
            self._rounds.clear()

    @property
    def microbatch(self) -> Microbatch | None:
        """The microbatch that the innermost loop's body is working on, if any."""
        return self._active[-1] if self._active else None

    def require_microbatch(self, call: str) -> Microbatch:
        """Return the current microbatch.

        Raises:
            StepError: outside of a loop over a loader.
        """
        if not self._active:
            raise StepError(
                f"{call} was called outside of a loop over a loader; "
                "expected to be inside, since the loader says what the batch weighs",
                hint="make the loader with run.loader(…) and iterate over it",
            )
        return self._active[-1]

    def require_meeting_point(self, call: str) -> None:
        """Refuse a collective call where ranks may host different numbers of replicas.

        Raises:
            StepError: inside a microbatch, when there are several replicas.
        """
        if self._active and self._replicas > 1:
            raise StepError(
                f"{call} was called inside a microbatch; with {self._replicas} replicas, a rank that "
                "hosts several would call it more often than one that hosts one",
                hint="call it after the loop, or between the batches of "
                "`for batch in run.batches(loader): …`",
            )
        self.settle()

    def settle(self) -> None:
        """Let ranks agree on what a `break` has left open; all of them come here together."""
        for model in self._models:
            model.check_whole()
            model.finish_buffers()

    def acts_now(self) -> bool:
        """Whether an update asked for now happens now: on the last microbatch of a global batch."""
        return not self._active or self._active[-1].last

    def updated(self) -> None:
        """An optimizer has updated its parameters."""
        self._updated = True

    def loop_begins(self, loader: int) -> tuple[int, int]:
        """Return the epoch and the round of a loop over `loader` that starts now."""
        self.require_meeting_point("iterating over a loader")
        round_ = self._rounds[loader]
        self._rounds[loader] += 1
        for listener in self._listeners:
            listener.loop_begins(loader, self._stretch, round_)
        return self._stretch, round_

    def needs_stand_ins(self) -> bool:
        """Whether replicas without a sample take part: where gradients or buffers meet."""
        return torch.is_grad_enabled() or any(model.trains_buffers for model in self._models)

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """The loop's body is about to see this microbatch."""
        self._active.append(microbatch)
        if not self._is_nested:
            for model in self._models:
                model.microbatch_begins(microbatch)
        for listener in self._listeners:
            listener.microbatch_begins(microbatch)
        set_key(keys.derive(self._seed, keys.FORWARD, *microbatch.numbers, microbatch.turn))

    @property
    def _is_nested(self) -> bool:
        """Whether this is an evaluation inside another loop's microbatch, as one replica allows."""
        return len(self._active) > 1

    def microbatch_ends(self, microbatch: Microbatch, *, left: bool = False) -> None:
        """The loop's body is done with this microbatch, or has left it."""
        if self._closed:
            return  # an exception ended the run; its loops are only now collected
        if not self._is_nested:
            for model in self._models:
                model.microbatch_ends(microbatch, left=left)
        self._active.pop()
        if microbatch.last:
            self._count_update(microbatch)

    def pass_ends(self, microbatch: Microbatch) -> None:
        """A pass over a global batch is over; `microbatch` was the last, seen or not."""
        loader, epoch, round_, step, _ = microbatch.numbers
        set_key(keys.derive(self._seed, keys.BETWEEN, loader, epoch, round_, step, microbatch.turn))
        self._passed = microbatch

    def batch_ends(self) -> None:
        """The script is done with a global batch."""
        if self._passed is not None and not self._active:
            self._count_update(self._passed)

    def _count_update(self, microbatch: Microbatch) -> None:
        if not self._updated:
            return
        self._updated = False
        self.steps += 1
        for listener in self._listeners:
            listener.step_ends(self.steps, microbatch)

    def loop_ends(self, loader: int, epoch: int, round_: int, step: int, *, early: bool) -> None:
        """The loop is over in global batch `step`: early by `break`, or after the last one."""
        if self._closed:
            return
        set_key(keys.derive(self._seed, keys.BETWEEN, loader, epoch, round_, -1, 0))
        for listener in self._listeners:
            listener.loop_ends(loader, epoch, round_, step, early=early)

    def close(self) -> None:
        """The run is over: what loops still say is nobody's affair."""
        self._closed = True
