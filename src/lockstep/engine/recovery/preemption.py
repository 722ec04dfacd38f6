"""Preemption: on a signal such as SIGTERM, all ranks save the state after the same step and end the run."""

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
    """`SystemExit` with the status 75, by which a run ends on a signal, after its state was saved.

    `step`: number of optimizer steps in the saved state.
    """

    def __init__(self, step: int) -> None:
        super().__init__(PREEMPTED)
        self.step = step


def chosen_signals(environ: Mapping[str, str]) -> list[signal.Signals]:
    """Return the signals that request the end of a run: SIGTERM, and the signal that the user has chosen.

    The user chooses by `--preempt-signal` or by its environment variable, which is read from `environ`.
    """
    name = TABLE["preempt_signal"].read(environ)
    chosen = signal.SIGTERM if name is None else signal_of(name, VARIABLE)
    return [signal.SIGTERM, *([chosen] if chosen != signal.SIGTERM else [])]


class Signals:
    """Signal handlers of an open run: the first signal requests the run's end, a second ends the process.

    The request is a call of `ask`. A handler is installed only in the main thread, and only for a signal
    for which the script has no handler. With `patient`, a second signal has no effect, since the launcher
    forwards signals and ends the process itself.
    """

    def __init__(self, ask: Callable[[], None], *, patient: bool) -> None:
        self._ask, self._patient = ask, patient
        self._count = 0
        self.handled: list[signal.Signals] = []

    def listen(self) -> None:
        """Install the signal handlers, one for each signal that requests the end of the run."""
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
        """Restore the default actions of the handled signals."""
        while self.handled:
            signal.signal(self.handled.pop(), signal.SIG_DFL)
        if self in _listening:
            _listening.remove(self)


#: The `Signals` of this process whose handlers are installed.
_listening: list[Signals] = []
#: Signal masks that are restored after a fork, by the identifier of the forking thread.
_masks: dict[int, set[signal.Signals | int]] = {}


def _before_fork() -> None:
    """Block the signals that `Signals` handles, before the current thread forks.

    The child process receives them only after `_in_child` has restored their default actions.
    """
    handled = {signum for signals in _listening for signum in signals.handled}
    _masks[threading.get_ident()] = signal.pthread_sigmask(signal.SIG_BLOCK, handled)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.pop(threading.get_ident()))


def _in_child() -> None:
    """Restore the default actions of handled signals in a forked child; unblock the signals there."""
    while _listening:
        _listening[-1].close()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_child)
