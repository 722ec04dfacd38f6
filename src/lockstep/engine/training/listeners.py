"""Callbacks on steps, batches, loops and epochs, which parts of a run register with its `Loop`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lockstep.engine.data.microbatch import Microbatch


class Listener(Protocol):
    """Callbacks on steps, batches and loops; a method that is not overridden does nothing."""

    def step_ends(self, step: int, microbatch: Microbatch) -> None:
        """Called after step number `step` (counted from 1) has updated the parameters."""
        return

    def loop_begins(self, loader: int, epoch: int, round_: int) -> None:
        """Called when a loop over a loader begins."""
        return

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """Called before a microbatch is yielded to the body of a loop."""
        return

    def loop_ends(self, loader: int, epoch: int, round_: int, step: int, *, early: bool) -> None:
        """Called when a loop over a loader has ended in its global batch `step`, `early` by `break`."""
        return


class PointListener(Listener):
    """Callbacks also on epochs and on points: between two batches, where the run's state is complete."""

    def epoch_begins(self) -> None:
        """Called when an epoch begins."""
        return

    def at_point(self) -> None:
        """Called where the state is complete: after a batch or an epoch, or in `run.save`."""
        return

    def arrived(self) -> None:
        """Called when a resumed run has reached its saved position and has loaded the state."""
        return


def overriding(listeners: Sequence[Listener], method: str) -> list[Callable[..., Any]]:
    """Return the bound methods named `method` of the listeners whose classes override it."""
    default = getattr(Listener, method)
    overriders = [own for own in listeners if getattr(type(own), method) is not default]
    return [getattr(own, method) for own in overriders]
