"""`Heartbeat`: counts signs of progress and logs collective calls of this rank, for launcher and watchdog.

To count a sign of progress costs less than a microsecond, and a step has a handful of signs.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from lockstep.engine.data.microbatch import LoopKey, Microbatch
from lockstep.engine.training.listeners import Listener
from lockstep.state.checkpoint.shared_memory import AFTER_RUN, COLLECTIVES, ProgressSlot
from lockstep.state.record import stacks

#: Numbers that identify a backward pass: loader, epoch, round, batch, iteration over the batch, models.
Detail = tuple[int, ...]

_CODES = {name: code for code, name in enumerate(COLLECTIVES)}
#: Number of collective calls in the log; a rank can be ahead of another one by fewer calls.
_RECENT = 16


class Call(NamedTuple):
    """A collective call of this rank: its number among the rank's calls, its name, and its `detail`.

    `detail`: for a backward pass, the numbers of the loader, the epoch, the loop, the batch, the iteration
    over the batch, and the models; empty for other calls.
    """

    number: int
    kind: str
    detail: Detail


class Heartbeat(Listener):
    """Counts signs of this rank's progress and logs its collective calls, so that hangs are detected.

    A sign of progress is the beginning or end of a loop, microbatch, step or collective call. `slot` is
    this rank's part of the status page, the memory in which the launcher reads the counts.

    Attributes:
        beat: number of signs of progress so far.
        recent: the latest collective calls.
        waits: whether the rank is still in the last call of `recent`.
    """

    def __init__(self, slot: ProgressSlot | None = None) -> None:
        self._slot = slot or ProgressSlot()
        self._elsewhere = 0
        self.beat = self._slot.beat
        self._entered = self._slot.entered
        self.recent: deque[Call] = deque(maxlen=_RECENT)
        self.waits = False

    @staticmethod
    def begin(slot: ProgressSlot | None, environ: Mapping[str, str]) -> Heartbeat:
        """Return a new heartbeat, which writes to `slot`, this rank's part of the status page.

        `slot` is `None` without a launcher. With a launcher, a signal handler is installed that writes this
        process's stacks to a file; `environ` names the file's directory.
        """
        if slot is not None:
            stacks.offer(environ)
        heartbeat = Heartbeat(slot)
        heartbeat.leave()
        return heartbeat

    def closes(self, *, left: bool = False) -> None:
        """Count the end of the run as a sign of progress, and report it to the launcher.

        `left`: whether `sys.exit` ended the run. If not, the launcher is told that the script continues
        after the run, so that a long wait there is no hang.
        """
        self.moves()
        if not left:
            self._slot.waiting = AFTER_RUN

    def moves(self) -> None:
        """Count one more sign of progress, which shows the launcher that this rank does not hang."""
        self.beat += 1
        self._slot.beat = self.beat + self._elsewhere

    def others_move(self) -> None:
        """Count progress of another rank, so that the launcher does not take this waiting rank for hung."""
        self._elsewhere += 1
        self._slot.beat = self.beat + self._elsewhere

    # --- collective calls ------------------------------------------------------------------------

    def enter(self, kind: str, detail: Detail = ()) -> None:
        """Record that this rank enters the collective call named `kind`.

        `detail`: for a backward pass, the numbers that identify it, as in `Call`; else empty.
        """
        self._entered += 1
        self.recent.append(Call(self._entered, kind, detail))
        self.waits = True
        self._slot.entered = self._entered
        self._slot.waiting = _CODES.get(kind, 1)
        self.moves()

    def leave(self) -> None:
        """Record that this rank has finished the current collective call."""
        self.waits = False
        self._slot.waiting = 0
        self.moves()

    @contextlib.contextmanager
    def collective(self, kind: str) -> Iterator[None]:
        """Return a context whose body makes the collective call `kind`.

        If this call is inside of another call, such as a backward pass with layers that all-reduce, the
        outer call is recorded as entered again after the body.
        """
        around = self.recent[-1] if self.waits else None
        self.enter(kind)
        try:
            yield
        finally:
            self.leave()
        if around is not None:
            # With a new number, since other ranks may still be in the inner call.
            self.enter(around.kind, around.detail)

    # --- callbacks of the loop --------------------------------------------------------------------

    def step_ends(self, step: int, microbatch: Microbatch) -> None:
        """Write the number of the finished step to the status page, and count it as progress."""
        self._slot.step = step
        self.moves()

    def loop_begins(self, loop: LoopKey) -> None:
        """Report the beginning of a loop to the launcher, as a sign of progress."""
        self.moves()

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """Count the beginning of a microbatch as a sign of progress, which the launcher watches."""
        self.moves()

    def loop_ends(self, loop: LoopKey, step: int, *, early: bool) -> None:
        """Note the end of a loop over a loader as progress; none of the arguments is used.

        The launcher watches for progress, to find a rank that hangs.
        """
        self.moves()
