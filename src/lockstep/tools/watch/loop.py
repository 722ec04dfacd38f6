"""Refresh the display of a run until the run ends or the user presses a key."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator

from rich.console import Console
from rich.live import Live

from lockstep.errors import PREEMPTED
from lockstep.tools.watch.screen import Screen
from lockstep.tools.watch.view import EventLine
from lockstep.tools.watch.watcher import Watcher

#: Exit codes by the status of a run that has ended; any other status means that it continues.
_ENDS = {"finished": 0, "failed": 1, "dead": 1, "preempted": PREEMPTED}
#: Largest number of lines printed about earlier events.
_MOMENTS = 10
_KEYS = "q or Ctrl-C leaves; the run continues"


def watch(watcher: Watcher, seconds: float | None) -> int:
    """Show a run until it ends or the user leaves; return an exit code.

    The exit code is 0 for a finished run, and if the user leaves. The display is refreshed every `seconds`:
    by default each second on a terminal, and every 5 seconds elsewhere.

    Raises:
        RunDirectoryError: if the record of the run can no longer be read.
    """
    console = Console()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # restores the terminal first
    try:
        if console.is_terminal:
            return _live(watcher, console, 1.0 if seconds is None else seconds)
        return _lines(watcher, 5.0 if seconds is None else seconds)
    except (KeyboardInterrupt, BrokenPipeError):
        return 0


def _live(watcher: Watcher, console: Console, seconds: float) -> int:
    """Show a full-screen display, refreshed every `seconds`, until the run ends or `q` is pressed.

    The last display stays on the terminal. Return the exit code.
    """
    view = watcher.look()
    try:
        with unbuffered(), Live(console=console, screen=True, auto_refresh=False) as live:
            while view.status not in _ENDS:
                live.update(Screen(view, _KEYS), refresh=True)
                if pressed("q", seconds):
                    return 0
                view = watcher.look()
    finally:
        console.print(Screen(view))
    return _ENDS[view.status]


def _lines(watcher: Watcher, seconds: float) -> int:
    """Print a summary every `seconds`, and a line for each new event, until the run ends.

    Return the exit code.
    """
    shown: tuple[EventLine, ...] = ()
    while True:
        view = watcher.look()
        for moment in view.moments[-_MOMENTS:]:
            if moment not in shown:
                _print(f"{time.strftime('%H:%M:%S', time.localtime(moment.time))}  {moment.text}")
        shown = view.moments
        _print(view.summary)
        if view.status in _ENDS:
            if view.end is not None:
                _print(view.end)
            return _ENDS[view.status]
        time.sleep(seconds)


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


@contextlib.contextmanager
def unbuffered() -> Iterator[None]:
    """Context manager in which key presses are read at once and without echo, if stdin is a terminal."""
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
    """Wait at most `seconds` for the key `key`; return whether it was pressed or stdin has ended."""
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
