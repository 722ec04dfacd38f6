"""`Listener`, `PointListener`: callbacks on steps, batches, loops, epochs and points."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lockstep.engine.data.microbatch import Microbatch


class Listener(Protocol):
    """Callbacks on steps, batches and loops; the defaults do nothing."""

    def step_ends(self, step: int, microbatch: Microbatch) -> None:
        """Step number `step` (counted from 1) has updated the parameters."""
        return

    def loop_begins(self, loader: int, epoch: int, round_: int) -> None:
        """A loop over a loader begins."""
        return

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """A loop's body is about to see a microbatch."""
        return

    def loop_ends(self, loader: int, epoch: int, round_: int, step: int, *, early: bool) -> None:
        """A loop over a loader is over, in its global batch `step`."""
        return


class PointListener(Listener):
    """Callbacks on epochs, and on places where the state is whole, too; the defaults do nothing."""

    def epoch_begins(self) -> None:
        """An epoch begins."""
        return

    def at_point(self) -> None:
        """The state is whole: the script is done with a batch or an epoch, or saves."""
        return

    def arrived(self) -> None:
        """A resumed run has come to its saved position, and has loaded the state."""
        return


def overriding(listeners: Sequence[Listener], method: str) -> list[Callable[..., Any]]:
    """Return `method` of those listeners that override it."""
    default = getattr(Listener, method)
    overriders = [own for own in listeners if getattr(type(own), method) is not default]
    return [getattr(own, method) for own in overriders]
