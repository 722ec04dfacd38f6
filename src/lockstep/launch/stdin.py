"""Choose the standard input of each rank: the launcher's standard input or the null device.

A rank that is the only one gets the launcher's input. Of several ranks, rank 0 gets a terminal, and no rank
gets a pipe or file.
"""

from __future__ import annotations

import contextlib
import os
import sys
import termios
from collections.abc import Iterator


def descriptor(rank: int, size: int, kind: str) -> int:
    """Return a descriptor for the standard input of a rank; the caller closes it.

    If the launcher's standard input is a terminal, and the launcher is in its foreground, rank 0 gets the
    terminal. If the input is a pipe or file, whose data ranks could not share, a rank gets it only if it is
    the single one (`size` is 1) and runs no function (`kind` is the kind of target). In all other cases, a
    rank gets the null device.
    """
    if rank == 0 and sys.__stdin__ is not None:  # otherwise descriptor 0 is another file
        is_only = size == 1 and kind != "function"
        if _is_foreground() if os.isatty(0) else is_only:
            return os.dup(0)
    return os.open(os.devnull, os.O_RDONLY)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Context manager: restore the settings of the terminal at the end.

    A debugger that was killed leaves the terminal without echo.
    """
    is_foreground = sys.__stdin__ is not None and os.isatty(0) and _is_foreground()
    before = termios.tcgetattr(0) if is_foreground else None
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal may be gone
            if before is not None and _is_foreground():  # the kernel stops background processes
                termios.tcsetattr(0, termios.TCSANOW, before)


def _is_foreground() -> bool:
    """Whether this launcher is in the foreground of the terminal on its standard input.

    If the launcher is in the background, ranks must not read from the terminal: the kernel would not stop
    them, since they are in other sessions.
    """
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # not the terminal of this session: no shell competes for its input
        return True
