"""Signals to the launcher, recorded as flags: no exception at an arbitrary line."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

#: Slurm preempts with SIGTERM, SIGCONT, SIGTERM: seconds in which a second signal repeats the first.
_SAME_REQUEST = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """A signal has stopped the launcher."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum)
        self.signum = signum


@dataclass(slots=True)
class Interrupts:
    """Signals received so far.

    Attributes:
        preempting: signals on which a run saves its state first.
    """

    preempting: frozenset[signal.Signals] = frozenset({signal.SIGTERM})
    first: signal.Signals | None = None
    count: int = 0
    _until: float = 0.0  # when a repetition begins to count

    def receive(self, signum: int, frame: FrameType | None = None) -> None:
        """Handle a signal: record it."""
        if self.is_preemption and signum in self.preempting and time.monotonic() < self._until:
            return
        self.first = self.first or signal.Signals(signum)
        self.count += 1
        if self.count == 1 and "SLURM_JOB_ID" in os.environ:
            self._until = time.monotonic() + _SAME_REQUEST

    def check(self) -> None:
        """Raise `Interrupted` if a signal has come."""
        if self.first is not None:
            raise Interrupted(self.first)

    @property
    def is_preemption(self) -> bool:
        """Whether one signal has come, on which a run saves its state first."""
        return self.first in self.preempting and self.count == 1

    @property
    def is_repeated(self) -> bool:
        """Whether a second signal has come: no more waiting."""
        return self.count > 1


@contextmanager
def listening(more: Collection[signal.Signals] = ()) -> Iterator[Interrupts]:
    """Handle signals as flags while the block runs; outside the main thread there are none.

    Args:
        more: signals on which a run saves its state first, as on SIGTERM.
    """
    interrupts = Interrupts(preempting=frozenset({signal.SIGTERM, *more}))
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    # A signal that was ignored before, as SIGHUP is under nohup, stays ignored. `None` is a handler
    # that was not installed from Python, and could not be put back.
    wanted = [n for n in {*_SIGNALS, *more} if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, interrupts.receive) for number in wanted}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
