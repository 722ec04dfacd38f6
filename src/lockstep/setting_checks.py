"""Functions that check the values of settings: ranges of numbers, the seed, audits, names of signals."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from typing import Any

from lockstep.errors import UsageError

#: Raises `UsageError` for an invalid value; its second argument names the flag, variable or argument.
Check = Callable[[Any, str], object]


def at_least(least: int, kind: type = int) -> Check:
    """Return a check that raises `UsageError` unless a value is finite and at least `least`.

    `kind`: `int` to accept only integers, `float` to accept other numbers, too.
    """

    def check(value: Any, origin: str) -> None:
        number = isinstance(value, int) or (kind is float and isinstance(value, float))
        if not number:
            wanted = "an integer of" if kind is int else "a number of"
            raise UsageError(f"{origin} is {value!r}; expected {wanted} at least {least}")
        if not (math.isfinite(value) and value >= least):
            raise UsageError(f"{origin} is {value}; expected at least {least}")

    return check


def check_seed(value: Any, origin: str) -> None:
    """Raise `UsageError` unless `value` is a signed 64-bit integer; `origin`: the flag or argument."""
    if not isinstance(value, int) or not -(2**63) <= value < 2**63:
        raise UsageError(f"{origin} is {value!r}; expected an integer of 64 bits")


def audit_steps(value: str) -> int | None:
    """Return the number of steps from one audit to the next, for a value of the setting `audit`.

    It is 0 for `first`, which audits only the first batches of loops, and `None` for `off`.
    """
    return {"off": None, "first": 0}[value] if value in ("off", "first") else int(value)


def check_audit(value: Any, origin: str) -> None:
    """Raise `UsageError` unless `value` is `off`, `first` or a positive number of steps.

    `origin`: the flag, variable or argument that gave the value.
    """
    if str(value) not in ("off", "first") and not (str(value).isdecimal() and int(value) > 0):
        raise UsageError(f"{origin} is {value!r}; expected off, first or a number of steps")


def check_directory(value: Any, origin: str) -> None:
    """Raise `UsageError` if `value` is a URL, such as `s3://bucket/run`, and not a directory.

    `origin`: the flag, variable or argument that gave the value.
    """
    scheme, separator, rest = str(value).partition(":/")  # a `Path` has one slash of two
    if separator and "/" not in scheme:
        raise UsageError(
            f"{origin} is the URL {scheme}://{rest.lstrip('/')}; expected a directory of this machine",
            hint="copy checkpoints from there to the store (manual, more-recipes)",
        )


#: Signals that cannot ask a run to end: no process can handle them, or the system sends them itself.
_UNFIT = {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD, signal.SIGSEGV, signal.SIGBUS}


def signal_of(name: str, origin: str) -> signal.Signals:
    """Return the signal with the given name, such as `USR1` or `SIGUSR1`.

    `origin`: the flag, variable or argument that gave the name.

    Raises:
        UsageError: if no signal has this name, or the signal cannot be used to end a run.
    """
    known = {one.name: one for one in signal.Signals}
    found = known.get("SIG" + name.upper().removeprefix("SIG"))
    if found is None or found in _UNFIT:
        raise UsageError(
            f"{origin} is {name!r}; expected the name of a signal that a process can handle",
            hint="for example USR1",
        )
    return found
