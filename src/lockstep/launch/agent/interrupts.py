"""Signals to the launcher, noted as flags: no exception at an arbitrary line."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

#: Slurm preempts with SIGTERM, SIGCONT, SIGTERM: seconds within which it says the same again.
_SAME_REQUEST = 1.0
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(BaseException):
    """The launcher was told to stop.

    Args:
        signum: the signal that said so.
    """

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum)
        self.signum = signum


@dataclass(slots=True)
class Interrupts:
    """What has been received so far.

    Attributes:
        polite: signals that ask for room: a run saves its state first.
        first: the first signal.
        count: how many have come.
    """

    polite: frozenset[signal.Signals] = frozenset({signal.SIGTERM})
    first: signal.Signals | None = None
    count: int = 0
    _until: float = 0.0  # when a repetition begins to count

    def receive(self, signum: int, frame: FrameType | None = None) -> None:
        """Note a signal: the handler."""
        if self.asks_for_room and signum in self.polite and time.monotonic() < self._until:
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
    def asks_for_room(self) -> bool:
        """Whether one signal has come, and a polite one."""
        return self.first in self.polite and self.count == 1

    @property
    def impatient(self) -> bool:
        """Whether a second signal has come: no more waiting."""
        return self.count > 1


@contextmanager
def listening(more: Collection[signal.Signals] = ()) -> Iterator[Interrupts]:
    """Handle signals as flags while the block runs; outside the main thread there are none.

    Args:
        more: signals that ask for room, as SIGTERM does.
    """
    interrupts = Interrupts(polite=frozenset({signal.SIGTERM, *more}))
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
