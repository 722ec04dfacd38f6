"""`Listener`, `PointListener`: callbacks on steps, microbatches, loops and epochs of a run.

Subclasses override callbacks; `Loop.listen` registers their instances.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer

from lockstep.engine.data.microbatch import LoopKey, Microbatch


class Listener(Protocol):
    """Base class with callbacks on steps, microbatches and loops, which do nothing unless overridden."""

    def step_ends(self, step: int, microbatch: Microbatch) -> None:
        """Called after step number `step` (counted from 1) has updated the parameters."""
        return

    def loop_begins(self, loop: LoopKey) -> None:
        """Called when a loop over a loader begins."""
        return

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """Called before a microbatch is yielded to the body of a loop."""
        return

    def loop_ends(self, loop: LoopKey, step: int, *, early: bool) -> None:
        """Called when a loop over a loader ends.

        `early`: whether the script left the loop early, in batch number `step`; otherwise `step` is the
        number of batches.
        """
        return


class PointListener(Listener):
    """Base class with further callbacks: on epochs, updates, and points with a complete state."""

    def epoch_begins(self) -> None:
        """Called when an epoch begins."""
        return

    def at_point(self) -> None:
        """Called where the state is complete: after a batch or an epoch, or in `run.save`."""
        return

    def update_begins(self, optimizer: Optimizer) -> None:
        """Called before an optimizer updates parameters, once per global batch."""
        return

    def arrived(self) -> None:
        """Called when a resumed run has reached its saved position in the script and loaded the state."""
        return


def overriding(listeners: Sequence[Listener], method: str) -> list[Callable[..., Any]]:
    """Return the bound methods named `method` of the listeners whose classes override it."""
    default = getattr(PointListener, method)
    overriders = [own for own in listeners if getattr(type(own), method, default) is not default]
    return [getattr(own, method) for own in overriders]
