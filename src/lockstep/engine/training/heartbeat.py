"""Heartbeat and progress of this rank, written for its launcher and the watchdog.

Costs less than a microsecond per event: a step has a handful of them.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.training.listeners import Listener
from lockstep.state.checkpoint.shared_memory import AFTER_RUN, COLLECTIVES, Slot
from lockstep.state.record import stacks

#: What a rank is in: which batch of which loop, and the models that a backward pass goes through.
Detail = tuple[int, ...]

_CODES = {name: code for code, name in enumerate(COLLECTIVES)}
#: Collective calls that are remembered: more than can be passed before another rank comes to them.
_RECENT = 16


class Call(NamedTuple):
    """A collective call.

    Attributes:
        number: how many of them the rank had come to, with this one.
        kind: which call it is.
        detail: what tells it from others of its kind; empty where nothing does.
    """

    number: int
    kind: str
    detail: Detail


class Heartbeat(Listener):
    """Where this rank stands.

    Args:
        slot: where the launcher looks; `None` without one.

    Attributes:
        beat: grows with everything that happens.
        recent: the calls that the rank has come to last.
        waits: whether it is in the last of them.
    """

    def __init__(self, slot: Slot | None = None) -> None:
        self._slot = slot or Slot(memoryview(bytearray(1 << 10)).cast("Q"), 0)
        self._elsewhere = 0
        self.beat = self._slot.beat
        self._entered = self._slot.entered
        self.recent: deque[Call] = deque(maxlen=_RECENT)
        self.waits = False

    @staticmethod
    def begin(slot: Slot | None, environ: Mapping[str, str]) -> Heartbeat:
        """Return the heartbeat of a rank that opens a run, and be ready to write stacks for its launcher.

        Args:
            slot: where the launcher looks; `None` without one.
            environ: the environment of this process.
        """
        if slot is not None:
            stacks.offer(environ)
        heartbeat = Heartbeat(slot)
        heartbeat.leave()
        return heartbeat

    def closes(self, *, left: bool = False) -> None:
        """The run is over: what comes now is the script's own affair, unless it `left` to end."""
        self.moves()
        if not left:
            self._slot.waiting = AFTER_RUN

    def moves(self) -> None:
        """Something has happened on this rank."""
        self.beat += 1
        self._slot.beat = self.beat + self._elsewhere

    def others_move(self) -> None:
        """This rank stands still, but not all do: no launcher shall take it for a hang."""
        self._elsewhere += 1
        self._slot.beat = self.beat + self._elsewhere

    # --- collective calls ------------------------------------------------------------------------

    def enter(self, kind: str, detail: Detail = ()) -> None:
        """Enter a collective call."""
        self._entered += 1
        self.recent.append(Call(self._entered, kind, detail))
        self.waits = True
        self._slot.entered = self._entered
        self._slot.waiting = _CODES.get(kind, 1)
        self.moves()

    def leave(self) -> None:
        """Leave a collective call: all ranks have entered it."""
        self.waits = False
        self._slot.waiting = 0
        self.moves()

    def pass_by(self, kind: str) -> None:
        """Pass a collective call without a wait."""
        self.enter(kind)
        self.leave()

    @contextlib.contextmanager
    def collective(self, kind: str) -> Iterator[None]:
        """Be in a collective call in the body.

        Inside another one, such as a backward pass with layers that sum, it returns to the outer call.
        """
        around = self.recent[-1] if self.waits else None
        self.enter(kind)
        try:
            yield
        finally:
            self.leave()
        if around is not None:
            # Under a number of its own: other ranks may be in the inner place still.
            self.enter(around.kind, around.detail)

    # --- what the loop tells ---------------------------------------------------------------------

    def step_ends(self, step: int, microbatch: Microbatch) -> None:
        """The parameters have been updated."""
        self._slot.step = step
        self.moves()

    def loop_begins(self, loader: int, epoch: int, round_: int) -> None:
        """A loop over a loader begins."""
        self.moves()

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """The loop has come to another microbatch."""
        self.moves()

    def loop_ends(self, loader: int, epoch: int, round_: int, step: int, *, early: bool) -> None:
        """A loop over a loader is over."""
        self.moves()
