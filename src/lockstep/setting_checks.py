"""Checks of settings that take more than a list of choices."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any

from lockstep.errors import UsageError

#: Refuses a value; the second argument is the flag, variable or argument that it comes from.
Check = Callable[[Any, str], object]


def at_least(least: int, kind: type = int) -> Check:
    """Return a check that refuses numbers below `least`, and values that are no numbers of that kind."""

    def check(value: Any, origin: str) -> None:
        number = isinstance(value, int) or (kind is float and isinstance(value, float))
        if not number:
            wanted = "an integer of" if kind is int else "a number of"
            raise UsageError(f"{origin} is {value!r}; expected {wanted} at least {least}")
        if not (math.isfinite(value) and value >= least):
            raise UsageError(f"{origin} is {value}; expected at least {least}")

    return check


def check_seed(value: Any, origin: str) -> None:
    """Refuse a value that is no integer of 64 bits."""
    if not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise UsageError(f"{origin} is {value!r}; expected an integer of 64 bits")


def audit_steps(value: str) -> int | None:
    """Return the steps between two audits: 0 for the first batch of loops alone, `None` for no audit."""
    return {"off": None, "first": 0}[value] if value in ("off", "first") else int(value)


def check_audit(value: Any, origin: str) -> None:
    """Refuse a value that is neither `off` nor `first` nor a number of steps."""
    if str(value) not in ("off", "first") and not (str(value).isdecimal() and int(value) > 0):
        raise UsageError(f"{origin} is {value!r}; expected off, first or a number of steps")


#: Signals that a process cannot handle, or that mean something else.
_UNFIT = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS}


def signal_of(name: str, origin: str) -> signal.Signals:
    """Return the signal of a name, with or without `SIG`.

    Raises:
        UsageError: if there is none, or no process can handle it.
    """
    known = {one.name: one for one in signal.Signals}
    found = known.get("SIG" + name.upper().removeprefix("SIG"))
    if found is None or found in _UNFIT:
        raise UsageError(
            f"{origin} is {name!r}; expected the name of a signal that a process can handle",
            hint="for example USR1",
        )
    return found
