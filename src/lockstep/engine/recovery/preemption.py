"""Preemption: on a signal the run ends after a step that all ranks agree on, with saved state."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping
from types import FrameType

from lockstep.errors import PREEMPTED
from lockstep.setting_checks import signal_of
from lockstep.settings import TABLE

VARIABLE = TABLE["preempt_signal"].variable


class Preempted(SystemExit):
    """The run was asked to end, and has saved its state after step number `step`."""

    def __init__(self, step: int) -> None:
        super().__init__(PREEMPTED)
        self.step = step


def chosen_signals(environ: Mapping[str, str]) -> list[signal.Signals]:
    """Return the signals that ask a run to end: SIGTERM, and the one that the user has chosen.

    Raises:
        UsageError: if the variable names none.
    """
    name = TABLE["preempt_signal"].read(environ)
    chosen = signal.SIGTERM if name is None else signal_of(name, VARIABLE)
    return [signal.SIGTERM, *([chosen] if chosen != signal.SIGTERM else [])]


class Signals:
    """Signal handlers while a run is open: the first signal calls `ask`, the second ends the process.

    Where the script has handlers of its own, or runs in another thread, there are none of ours. When
    `patient`, further signals change nothing: a launcher passes them on, and knows when to end.
    """

    def __init__(self, ask: Callable[[], None], *, patient: bool) -> None:
        self._ask, self._patient = ask, patient
        self._count = 0
        self.handled: list[signal.Signals] = []

    def listen(self) -> None:
        """Install the handlers."""
        wanted = chosen_signals(os.environ)
        if threading.current_thread() is not threading.main_thread():
            return
        for signum in wanted:
            if signal.getsignal(signum) is signal.SIG_DFL:
                signal.signal(signum, self._receive)
                self.handled.append(signum)
        _listening.append(self)

    def _receive(self, signum: int, _frame: FrameType | None) -> None:
        self._count += 1
        if self._count == 1:
            self._ask()
        if self._count == 1 or self._patient:
            return
        signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)

    def close(self) -> None:
        """Restore the default actions."""
        while self.handled:
            signal.signal(self.handled.pop(), signal.SIG_DFL)
        if self in _listening:
            _listening.remove(self)


#: Handlers of this process that are installed.
_listening: list[Signals] = []
#: Signals that a forking thread blocks otherwise, by thread.
_masks: dict[int, set[signal.Signals | int]] = {}


def _before_fork() -> None:
    """Block handled signals, which wait in the child until it has its own actions."""
    handled = {signum for signals in _listening for signum in signals.handled}
    _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, handled)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop(threading.get_ident()))


def _in_child() -> None:
    """Give a forked child the default actions: it has no run to save."""
    while _listening:
        _listening[-1].close()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
