"""`Evaluations`: ends a preempted run inside of a loop over a loader, if the loop computes no gradients.

The run saves its state from before the loop, or from before the call of `run.mean`, `run.sum` or
`run.gather` that contains the loop. The resumed run begins the loop or call again.

This requires that the models have not changed since the last loop that trained (a script may replace their
weights for a while), and that objects of `run.register` have not changed since the loop began. Otherwise
the run ends after the next trained batch or epoch.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch.distributed as dist
from torch.nn.parameter import is_lazy

from lockstep.engine.recovery.coordination import Coordination
from lockstep.engine.recovery.state import State
from lockstep.engine.training.checksums import Checksums
from lockstep.engine.training.tensor_bits import bits, read
from lockstep.state.checkpoint import state_codec
from lockstep.state.checkpoint.position import Counters, LoopEvent

_GO_ON = "go on"


class Agreement:
    """Agreement of all ranks, through the key-value store, to end the run within one loop over a loader.

    Ranks may iterate at different speeds, or wait for each other in every batch. After a request to end the
    run, each rank writes to the store that it is inside the loop, and continues. The first rank that finds
    all ranks inside chooses the number of its own next batch. Each rank ends after this batch, or at once
    if it is past it. If a rank finishes the loop before a number is chosen, no rank ends in this loop.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._loop = ""
        self.is_here = False

    def begins(self, loop: str) -> None:
        """Prepare for a new loop over a loader; `loop` is the loop's name, the same on all ranks."""
        self._loop, self.is_here = loop, False

    def after(self, batch: int) -> bool:
        """Return whether this rank ends the run now, after `batch` batches of the loop.

        Call this method after each batch once the rank knows of a request to end the run.
        """
        store, here = self._store, f"{self._loop}/here"
        if not self.is_here:
            self.is_here = True
            store.set(f"{here}/{self._rank}", "1")
        if store.check([f"{here}/{rank}" for rank in range(self._size)]):
            return batch >= self._decide(str(batch + 1))
        return False

    def ends(self) -> bool:
        """Return, after the loop's last batch on this rank, whether the run ends in this loop.

        If no rank has chosen the last batch yet, no rank ends in this loop.
        """
        return self.is_here and self._decide(_GO_ON) < float("inf")

    def _decide(self, wanted: str) -> float:
        """Propose where the run ends; return the agreed number of the batch after which it ends.

        `wanted`: a batch's number as text, or "go on" for no end in this loop. The first proposal of any
        rank counts for all ranks; if it is "go on", the result is `inf`.
        """
        text = self._store.compare_set(f"{self._loop}/end", "", wanted).decode()
        return float("inf") if text == _GO_ON else int(text)


#: Placeholder for the hashes of the models where none were computed.
_UNKNOWN: list[tuple[int, int]] = [(-1, -1)]


class Evaluations:
    """Ends a run inside of a loop that only evaluates, if a signal has requested the end of the run.

    Args:
        state: the run's models and registered objects, which such a loop must leave unchanged.
        coordination: object that tells whether a signal has requested the end of the run.
        agreement: chooses the batch after which all ranks end; `None` in a world of one rank.
        leave: function that saves the state and ends the run; its arguments are the loop, and the
            run's counters at the beginning of the loop.
    """

    def __init__(
        self,
        state: State,
        coordination: Coordination,
        agreement: Agreement | None,
        leave: Callable[[LoopEvent, Counters], None],
    ) -> None:
        self._state, self._coordination = state, coordination
        self._agreement, self._leave = agreement, leave
        self._models: list[tuple[int, int]] | None = None
        self._next = 0.0  # when models may be hashed again
        self._registered = ""
        self._counters = Counters()
        self._loop: LoopEvent | None = None

    def trained(self) -> None:
        """Hash the models after a loop that trains, so that later changes by the script are detected.

        If loops are so short that hashing would take more than 1 % of the time, models are not hashed. Then
        a run that is asked to end in an evaluation computes the evaluation to its end, since the script may
        have changed the models.
        """
        began = time.monotonic()
        if began < self._next:
            self._models = _UNKNOWN
            return
        self._models = self._sums_of_models()
        ended = time.monotonic()
        self._next = ended + 100 * (ended - began)

    def begins(self, loop: LoopEvent, counters: Counters) -> None:
        """Record that a loop begins, inside no other loop; hash the states of objects of `run.register`.

        `counters`: the run's counts of steps and loops before the loop began.
        """
        self._loop, self._counters = loop, counters
        if self._models is None:
            self._models = self._sums_of_models()
        if self._models is not _UNKNOWN:
            self._registered = self._sum_of_registered()
        if self._agreement is not None:
            self._agreement.begins("/".join(map(str, loop.key)))

    def learns(self) -> None:
        """Record that the current loop computes gradients, so that the run does not end inside of it."""
        self._loop = None

    def batch_ends(self, batch: int) -> None:
        """End the run after `batch` batches of the loop, if its end was requested and all ranks agree.

        Raises:
            Preempted: if the run ends here; its state is on disk then.
        """
        loop, agreement = self._loop, self._agreement
        if loop is None or not self._coordination.stop_is_asked:
            return
        if (agreement is None or not agreement.is_here) and not self._is_unchanged():
            return
        if agreement is None or agreement.after(batch):
            self._loop = None
            self._leave(loop, self._counters)

    def loop_ends(self, *, trained: bool) -> None:
        """Record that a loop ends; `trained` says whether it has updated parameters.

        Raises:
            Preempted: if the loop only evaluated, and all ranks have agreed to end the run in it.
        """
        if trained:
            self.trained()
        loop, self._loop = self._loop, None
        agreement = self._agreement
        if loop is not None and agreement is not None and not trained and agreement.ends():
            self._leave(loop, self._counters)

    def _is_unchanged(self) -> bool:
        return (
            self._models is not _UNKNOWN
            and all(model.is_synchronized for model in self._state.models)
            and self._registered == self._sum_of_registered()
            and self._models == self._sums_of_models()
        )

    def _sums_of_models(self) -> list[tuple[int, int]]:
        modules = [model.module for model in self._state.models]
        tensors = [t for m in modules for t in (*m.parameters(), *m.buffers())]
        # Meta tensors have no values on this rank; lazy ones have none until their first forward pass.
        return read([bits(t) for t in tensors if not (is_lazy(t) or t.is_meta)])

    def _sum_of_registered(self) -> str:
        registered = self._state.registered
        states = {name: value.state_dict() for name, value in registered.items()}
        _, tensors = state_codec.flatten({"registered": states})
        return Checksums.of(tensors, states).brief()
