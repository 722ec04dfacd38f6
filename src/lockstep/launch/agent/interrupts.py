"""Signal handlers of the launcher: record signals as flags, which the launcher polls."""

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
    """Raised if the launcher has received a signal and must exit; `signum` is the signal."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(signum)
        self.signum = signum


@dataclass(slots=True)
class Interrupts:
    """Signals that the launcher has received.

    Attributes:
        preempting: signals on which a run saves its state before it ends.
        first: the first signal; `None` before any.
    """

    preempting: frozenset[signal.Signals] = frozenset({signal.SIGTERM})
    first: signal.Signals | None = None
    count: int = 0
    _until: float = 0.0  # before this moment, a repeated signal is ignored

    def receive(self, signum: int, frame: FrameType | None = None) -> None:
        """Signal handler: record the first signal, and count all signals.

        Slurm preempts a job with several signals. So under Slurm a repeat within a second of the first
        signal is ignored, if runs save on this signal.
        """
        if self.is_preemption and signum in self.preempting and time.monotonic() < self._until:
            return
        self.first = self.first or signal.Signals(signum)
        self.count += 1
        if self.count == 1 and "SLURM_JOB_ID" in os.environ:
            self._until = time.monotonic() + _SAME_REQUEST

    def check(self) -> None:
        """Raise `Interrupted` if the launcher has received a signal."""
        if self.first is not None:
            raise Interrupted(self.first)

    @property
    def is_preemption(self) -> bool:
        """Whether exactly one signal was received, and runs save their state on this signal."""
        return self.first in self.preempting and self.count == 1

    @property
    def is_repeated(self) -> bool:
        """Whether a second signal was received, so that the launcher must not wait any longer."""
        return self.count > 1


@contextmanager
def listening(more: Collection[signal.Signals] = ()) -> Iterator[Interrupts]:
    """Context manager: record SIGINT, SIGTERM and SIGHUP instead of handling them.

    In a thread that is not the main thread, no signal is recorded.

    Args:
        more: further signals to record, on which a run saves its state as on SIGTERM.
    """
    interrupts = Interrupts(preempting=frozenset({signal.SIGTERM, *more}))
    if threading.current_thread() is not threading.main_thread():
        yield interrupts
        return
    # Ignored signals stay ignored, such as SIGHUP under nohup. `None` means a handler that was not
    # installed from Python, which could not be restored.
    wanted = [n for n in {*_SIGNALS, *more} if signal.getsignal(n) not in (signal.SIG_IGN, None)]
    before = {number: signal.signal(number, interrupts.receive) for number in wanted}
    try:
        yield interrupts
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
