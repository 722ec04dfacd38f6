"""Heartbeat and collective calls of this rank, for its launcher and the watchdog.

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

#: Numbers of a backward pass: loader, epoch, round, batch and turn, then its models.
Detail = tuple[int, ...]

_CODES = {name: code for code, name in enumerate(COLLECTIVES)}
#: Collective calls that are remembered: more than can be passed before another rank comes to them.
_RECENT = 16


class Call(NamedTuple):
    """A collective call: its number on its rank, its name, and the numbers that identify it."""

    number: int
    kind: str
    detail: Detail


class Heartbeat(Listener):
    """Counts events of this rank, and keeps a log of its collective calls.

    Args:
        slot: memory that the launcher reads; `None` without one.

    Attributes:
        beat: grows with each event.
        recent: the latest calls.
        waits: whether the rank is in the last of them.
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
        """Return the heartbeat of a rank that opens a run; with a launcher, prepare to write its stacks."""
        if slot is not None:
            stacks.offer(environ)
        heartbeat = Heartbeat(slot)
        heartbeat.leave()
        return heartbeat

    def closes(self, *, left: bool = False) -> None:
        """Note the end of the run: the rank may wait in the script's own code, unless it `left` to end."""
        self.moves()
        if not left:
            self._slot.waiting = AFTER_RUN

    def moves(self) -> None:
        """Count an event of this rank."""
        self.beat += 1
        self._slot.beat = self.beat + self._elsewhere

    def others_move(self) -> None:
        """Count an event of another rank, so that a launcher takes this rank's wait for no hang."""
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

    @contextlib.contextmanager
    def collective(self, kind: str) -> Iterator[None]:
        """Enter a collective call, and leave it after the body.

        Inside another call, such as a backward pass with layers that sum, that one is entered again.
        """
        around = self.recent[-1] if self.waits else None
        self.enter(kind)
        try:
            yield
        finally:
            self.leave()
        if around is not None:
            # Under a new number: other ranks may be in the inner call still.
            self.enter(around.kind, around.detail)

    # --- callbacks of the loop --------------------------------------------------------------------

    def step_ends(self, step: int, microbatch: Microbatch) -> None:
        """The parameters have been updated."""
        self._slot.step = step
        self.moves()

    def loop_begins(self, loader: int, epoch: int, round_: int) -> None:
        """A loop over a loader begins."""
        self.moves()

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """A microbatch begins."""
        self.moves()

    def loop_ends(self, loader: int, epoch: int, round_: int, step: int, *, early: bool) -> None:
        """A loop over a loader is over."""
        self.moves()
