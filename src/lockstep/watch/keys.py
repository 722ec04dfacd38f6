"""Keys that are pressed while a picture is shown."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Iterator


@contextlib.contextmanager
def unbuffered() -> Iterator[None]:
    """Let keys come without a line's end, and unseen; nothing changes where standard input is none."""
    if not sys.stdin.isatty():
        yield
        return
    file = sys.stdin.fileno()
    before = termios.tcgetattr(file)
    try:
        tty.setcbreak(file)
        yield
    finally:
        termios.tcsetattr(file, termios.TCSADRAIN, before)


def pressed(key: str, seconds: float) -> bool:
    """Wait at most `seconds` for `key`; return whether it came."""
    if not sys.stdin.isatty():
        time.sleep(seconds)
        return False
    deadline = time.monotonic() + seconds
    file = sys.stdin.fileno()
    while select.select([file], [], [], max(0.0, deadline - time.monotonic()))[0]:
        given = os.read(file, 64)
        if not given or key.encode() in given:
            return True  # without input there is no key to wait for
    return False
