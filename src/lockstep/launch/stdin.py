"""Standard input of the launcher: for its only rank, or for rank 0 if it is a terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import termios
from collections.abc import Iterator


def descriptor(rank: int, size: int, kind: str) -> int:
    """Return a descriptor of the standard input of a rank; the caller closes it.

    Several ranks cannot share what a pipe or a file holds. A function's parent reads its input itself.
    """
    if rank == 0 and sys.__stdin__ is not None:  # closed, its number belongs to another file
        is_only = size == 1 and kind != "function"
        if _is_foreground() if os.isatty(0) else is_only:
            return os.dup(0)
    return os.open(os.devnull, os.O_RDONLY)


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Leave the terminal as it was: a debugger that is killed leaves it without echo."""
    is_foreground = sys.__stdin__ is not None and os.isatty(0) and _is_foreground()
    before = termios.tcgetattr(0) if is_foreground else None
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # the terminal may be gone
            if before is not None and _is_foreground():  # the kernel stops background processes
                termios.tcsetattr(0, termios.TCSANOW, before)


def _is_foreground() -> bool:
    """Whether this launcher may read the terminal that its standard input is.

    One in the background may not, but its ranks have sessions of their own: the kernel would let them.
    """
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:  # not the terminal of this session: no shell competes for its input
        return True
