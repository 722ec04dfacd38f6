"""`CallSites`: counts calls of methods such as `run.model`; raises an error for calls in loops."""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from lockstep.engine.training.loop import Loop
from lockstep.errors import StepError
from lockstep.state.record import stacks

#: Name of a method of the run, and the stack of the script's call.
_Site = tuple[str, tuple[stacks.Frame, ...]]


class CallSites:
    """Counts the script's calls of methods such as `run.model`.

    An error is raised if a line of the script makes its call again in a later epoch or batch. A resumed run
    skips finished epochs and batches, and would make fewer objects than before the restart.
    """

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._iterations: dict[_Site, dict[Any, int]] = {}  # epoch and batch of the first call
        self._calls: Counter[str] = Counter()

    def count(self, call: str) -> int:
        """Return how often the script has called the run's method `call`, this call included.

        Raises:
            StepError: if the same line called it in an earlier epoch or batch of the current loop.
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
