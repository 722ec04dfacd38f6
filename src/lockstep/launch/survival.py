"""What the user says of failures: restarts, preemption, checkpoints, hangs."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.errors import UsageError

#: Seconds without any sign of life after which a rank counts as hanging, unless the user says otherwise.
HANG_TIMEOUT = 1800.0
#: Seconds between SIGTERM and SIGKILL, unless the user says otherwise.
GRACE = 5.0
#: Signals that no process can be told politely with.
_UNFIT = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Survival:
    """What the user says of failures, before the environment is asked for the rest.

    Attributes:
        max_restarts: failures in a row without progress after which workers are started again; `None`
            leaves `LOCKSTEP_MAX_RESTARTS` and then what the kind of failure suggests.
        preempt_signal: name of a signal that preempts the run, besides SIGTERM; `None` leaves
            `LOCKSTEP_PREEMPT_SIGNAL`.
        checkpoint_every: seconds between checkpoints, 0 for none; `None` leaves
            `LOCKSTEP_CHECKPOINT_EVERY` and then the script.
        keep: how many checkpoints are kept; `None` leaves `LOCKSTEP_KEEP` and then the script.
        signals: names of signals that end the launch as SIGTERM does, and are passed on to the ranks of
            scripts that have opened no run.
        shutdown_timeout: seconds between asking ranks to end and killing them; `None` leaves
            `TORCH_ELASTIC_SHUTDOWN_TIMEOUT`, as torchrun does, and then five.
        hang_timeout: seconds without a sign of life after which a rank counts as hanging, 0 for never;
            `None` leaves `LOCKSTEP_HANG_TIMEOUT` and then half an hour.

    Raises:
        UsageError: if a value cannot work.
    """

    max_restarts: int | None = None
    preempt_signal: str | None = None
    checkpoint_every: float | None = None
    keep: int | None = None
    hang_timeout: float | None = None
    signals: tuple[str, ...] = ()
    shutdown_timeout: float | None = None

    def __post_init__(self) -> None:
        _check_least("--max-restarts", self.max_restarts, 0)
        _check_least("--checkpoint-every", self.checkpoint_every, 0)
        _check_least("--keep", self.keep, 1)
        _check_least("--hang-timeout", self.hang_timeout, 0)
        _check_least("--shutdown-timeout", self.shutdown_timeout, 0)
        for name in self.signals:
            _signal("--signals-to-handle", name)
        if self.preempt_signal is not None:
            _signal("--preempt-signal", self.preempt_signal)

    def restarts(self, environ: Mapping[str, str]) -> int | None:
        """Return how many restarts were asked for, if any number was."""
        if self.max_restarts is not None:
            return self.max_restarts
        value = _number(environ, "LOCKSTEP_MAX_RESTARTS")
        return None if value is None else int(value)

    def preemption(self, environ: Mapping[str, str]) -> signal.Signals | None:
        """Return the signal that preempts, besides SIGTERM."""
        if self.preempt_signal is not None:
            return _signal("--preempt-signal", self.preempt_signal)
        name = environ.get("LOCKSTEP_PREEMPT_SIGNAL")
        return _signal("LOCKSTEP_PREEMPT_SIGNAL", name) if name else None

    def polite(self, environ: Mapping[str, str]) -> frozenset[signal.Signals]:
        """Return the signals besides SIGTERM that ask for room."""
        chosen = self.preemption(environ)
        return self.passed_on | (frozenset() if chosen is None else {chosen})

    @property
    def passed_on(self) -> frozenset[signal.Signals]:
        """Return the signals that ranks get as they come."""
        return frozenset(_signal("--signals-to-handle", name) for name in self.signals)

    def grace(self, environ: Mapping[str, str]) -> float:
        """Return the seconds between asking ranks to end and killing them."""
        if self.shutdown_timeout is not None:
            return self.shutdown_timeout
        value = _number(environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
        return GRACE if value is None else value

    def patience(self, environ: Mapping[str, str]) -> float:
        """Return the seconds after which a rank hangs; 0 for never."""
        if self.hang_timeout is not None:
            return self.hang_timeout
        value = _number(environ, "LOCKSTEP_HANG_TIMEOUT")
        return HANG_TIMEOUT if value is None else value

    def variables(self) -> dict[str, object]:
        """Return the workers' variables; `None` keeps what the user's shell says."""
        name = self.preempt_signal
        return {
            "LOCKSTEP_PREEMPT_SIGNAL": name and _signal("", name).name.removeprefix("SIG"),
            "LOCKSTEP_CHECKPOINT_EVERY": self.checkpoint_every,
            "LOCKSTEP_KEEP": self.keep,
        }


def _check_least(flag: str, value: float | None, least: int) -> None:
    if value is not None and not (math.isfinite(value) and value >= least):
        raise UsageError(f"{flag} is {value}; expected at least {least}")


def _number(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{name} is {text!r}; expected a number") from None
    _check_least(name, value, 0)
    return value


def _signal(where: str, name: str) -> signal.Signals:
    known = {one.name: one for one in signal.Signals}
    found = known.get("SIG" + name.upper().removeprefix("SIG"))
    if found is None or found in _UNFIT:
        raise UsageError(
            f"{where} is {name!r}; expected the name of a signal that a process can handle",
            hint="for example USR1",
        )
    return found
