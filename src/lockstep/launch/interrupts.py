"""Signals to the launcher become flags that it looks at: no exception at an arbitrary line."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

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
    """What has been received so far."""

    first: signal.Signals | None = None
    count: int = 0

    def receive(self, signum: int, frame: FrameType | None = None) -> None:
        """Note a signal: the handler."""
        self.first = self.first or signal.Signals(signum)
        self.count += 1

    def check(self) -> None:
        """Raise `Interrupted` if a signal has come."""
        if self.first is not None:
            raise Interrupted(self.first)

    @property
    def impatient(self) -> bool:
        """Whether a second signal has come: no more waiting."""
        return self.count > 1


@contextmanager
def listening() -> Iterator[Interrupts]:
    """Handle signals as flags while the block runs; outside the main thread there are none."""
    interrupts = Interrupts()
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    # A signal that was ignored before, as SIGHUP is under nohup, stays ignored. `None` is a handler
    # that was not installed from Python, and could not be put back.
    wanted = [n for n in _SIGNALS if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, interrupts.receive) for number in wanted}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
