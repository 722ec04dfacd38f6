"""`Listener`: callbacks on steps, batches and loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from lockstep.engine.data.microbatch import Microbatch


class Listener(Protocol):
    """Is told of steps and loops; a subclass says what it does with those that it needs."""

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


def overriding(listeners: Sequence[Listener], method: str) -> list[Callable[..., Any]]:
    """Return `method` of those listeners that do something there."""
    default = getattr(Listener, method)
    return [getattr(one, method) for one in listeners if getattr(type(one), method) is not default]
