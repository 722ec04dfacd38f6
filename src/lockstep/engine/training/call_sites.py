"""Call sites in the script that give models, optimizers and schedulers to the run."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from lockstep.engine.training.loop import Loop
from lockstep.errors import StepError
from lockstep.state.record import stacks

#: A call, and the stack from which the script makes it.
_Site = tuple[str, tuple[stacks.Frame, ...]]


class CallSites:
    """Refuses objects that the script makes anew in each epoch or batch.

    A run that resumes passes over epochs and batches that are done, so that it makes fewer of them.

    Args:
        loop: where the run stands.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._iterations: dict[_Site, dict[Any, int]] = {}  # in which epoch or batch each was
        self._calls: Counter[str] = Counter()

    def count(self, call: str) -> int:
        """Return how many calls of this name there are, with this one.

        Raises:
            StepError: if the same line has made one in an earlier epoch of this `run.epochs`, or in an
                earlier batch of this loop.
        """
        frames = stacks.of(sys._getframe(1))
        now = self._loop.iterations
        earlier = self._iterations.setdefault((call, tuple(frames)), {})
        if any(earlier.get(level, number) != number for level, number in now.items()):
            raise StepError(
                f"{call} was called again at {stacks.users(frames)}, in a later epoch or batch; expected "
                "one call, since a run that resumes there passes over the earlier ones",
                hint="make it before run.epochs; where each phase of the training needs a new one, call "
                "run.epochs once for each phase",
            )
        earlier.update(now)
        self._calls[call] += 1
        return self._calls[call]
