"""`RankStatistics`: warns of variables that a loop without training computes from one rank's samples.

A loop over a loader yields the samples of this rank's replicas. `run.mean`, `run.sum` and `run.gather`
combine the samples of all ranks; a sum that the loop's body computes itself depends on the number of ranks.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

from lockstep.engine.data.microbatch import LoopKey
from lockstep.engine.training import liveness
from lockstep.engine.training.carried_variables import named
from lockstep.engine.training.listeners import Listener
from lockstep.engine.training.loop import Loop
from lockstep.engine.training.observations import Observation, VariableChange
from lockstep.state.record import stacks
from lockstep.world.model import World

#: Number of loops over each loader that are examined.
_LOOPS = 8


class _LoopStart(NamedTuple):
    """Record of the beginning of a loop, for a comparison at its end.

    `frame`: id of the stack frame that runs the loop. `seen`: fingerprints of the variables. `passes`:
    number of backward passes so far.
    """

    loop: LoopKey
    frame: int
    seen: Observation
    passes: int


class RankStatistics(Listener):
    """Warns of variables that a loop without a backward pass has computed from this rank's samples.

    Only rank 0 warns, and not after a restart. `observe` returns fingerprints of a frame's variables,
    `passes` the number of backward passes so far.
    """

    def __init__(
        self,
        loop: Loop,
        world: World,
        observe: Callable[..., Observation],
        passes: Callable[[], int],
        warn: Callable[[str], None],
    ) -> None:
        self._loop, self._look, self._passes, self._warn = loop, observe, passes, warn
        self._looks = world.is_main and world.generation == 0
        self._loops: Counter[int] = Counter()  # number of loops over each loader
        self._begun: _LoopStart | None = None

    def loop_begins(self, loop: LoopKey) -> None:
        """Record fingerprints of the script's variables when an outermost loop begins.

        Loops that feed a metric, such as `run.mean`, are left out.
        """
        run = self._loop
        is_outermost = run.microbatch is None and not run.progress.open_metrics
        if not self._looks or not is_outermost or run.is_replaying:
            return
        self._loops[loop.loader] += 1
        frame = _of_loop(sys._getframe(1)) if self._loops[loop.loader] <= _LOOPS else None
        if frame is not None and liveness.is_at_for(frame):
            seen = self._observe(frame)
            self._begun = _LoopStart(loop, id(frame), seen, self._passes())

    def loop_ends(self, loop: LoopKey, step: int, *, early: bool) -> None:
        """Warn of variables that the loop computed from this rank's samples only.

        Nothing is done if the loop ran a backward pass.
        """
        begun = self._begun
        if begun is None or begun.loop != loop:
            return
        self._begun = None
        frame = _of_loop(sys._getframe(1))
        if frame is None or id(frame) != begun.frame or self._passes() != begun.passes:
            return
        changes = self._changes(frame, begun.seen)
        is_generator = frame.f_code.co_flags & inspect.CO_GENERATOR
        if changes or is_generator:
            self._loops[loop.loader] = _LOOPS  # warn once for each loader
            file = frame.f_code.co_filename.rpartition("/")[2]
            place = f"the loop over loader {loop.loader} ({file}:{frame.f_lineno})"
            what = f"{named(changes)} came from" if changes else f"{place} sees"
            self._warn(
                f"lockstep: warning: {what} this rank's samples only"
                + (f", in {place}" if changes else "")
                + ", and other layouts have others; hint: run.sum(… for x, y in loader) adds up those of "
                "all ranks; so do run.mean and run.gather"
            )

    def _observe(self, frame: FrameType) -> Observation:
        return self._look(frame, look=_read, innermost=True)

    def _changes(self, frame: FrameType, before: Observation) -> list[VariableChange]:
        """Return the variables that the loop has changed or created, and that are read later.

        `frame`: stack frame of the script that runs the loop. `before`: fingerprints before the loop.
        """
        code = frame.f_code
        given = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        later = {*given, *(one.name for one in liveness.read_after(frame))}
        after = self._observe(frame)
        made = [
            VariableChange(place.name, place.file, now.line, "", now.text)
            for place, now in after.values.items()
            if place not in before.values and now.kind != "object"
        ]
        return [
            one
            for one in (*after.changes_since(before), *made)
            if "." in one.name or one.name in later
        ]


def _read(frame: FrameType, *, returns: bool) -> liveness.Uses:
    """Return the variables that `frame` reads in further iterations of its loop, or after it.

    Variables that are only printed are included. `returns`: whether the return value of the frame's
    function has effects besides output.
    """
    uses = {**liveness.carried(frame), **liveness.read_after(frame, returns=returns)}
    return {one: use._replace(matters=True, is_item=False) for one, use in uses.items()}


def _of_loop(frame: FrameType | None) -> FrameType | None:
    """Return the script's stack frame that runs the current loop over a loader.

    Return `None` if a library runs the loop, such as `update_bn`. The search goes from `frame` outwards.
    """
    while frame is not None:
        file, is_generator = frame.f_code.co_filename, frame.f_code.co_flags & inspect.CO_GENERATOR
        if stacks.is_users(file):
            return frame
        if not is_generator and not stacks.is_own(file):
            return None
        frame = frame.f_back
    return None
