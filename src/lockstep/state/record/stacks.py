"""Python stacks of a process: write them on a signal, parse them, and find the user's line."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import re
import signal
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from types import FrameType

import lockstep

#: The signal on which a worker writes its stacks. It kills a process that has no handler for it.
SIGNAL = signal.SIGRTMIN + 7

_THREAD = re.compile(r"^(Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)
_PACKAGE = str(Path(lockstep.__file__).parent) + "/"
_LIBRARIES = tuple(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib"))
_INSTALLED = ("/site-packages/", "/dist-packages/")

#: The file for stacks, which must stay open: the signal's handler only has its descriptor.
_files: list[FileIO] = []


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a Python stack: source file, line number and function."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{_short(self.file)}:{self.line} in {self.function}"

    @property
    def is_users(self) -> bool:
        """Whether the frame's source file is the user's: neither Lockstep's nor a library's."""
        return is_users(self.file)


def is_own(file: str) -> bool:
    """Whether a source file belongs to Lockstep."""
    return file.startswith(_PACKAGE)


@functools.cache
def is_users(file: str) -> bool:
    """Whether a source file is the user's: neither Lockstep's nor a library's."""
    foreign = (_PACKAGE, *_LIBRARIES, "<frozen ")
    return not file.startswith(foreign) and not any(part in file for part in _INSTALLED)


def beside(error_file: Path) -> Path:
    """Return the path of the file for a worker's Python stacks: `error_file` with suffix `.stacks`."""
    return error_file.with_suffix(".stacks")


def offer(environ: Mapping[str, str]) -> None:
    """Install a handler of `SIGNAL` that writes the Python stacks of all threads to a file.

    The file lies next to the error file that `TORCHELASTIC_ERROR_FILE` in `environ` names. Without this
    variable, or if the file cannot be opened, no handler is installed.
    """
    error_file = environ.get("TORCHELASTIC_ERROR_FILE")
    if not error_file:
        return
    with contextlib.suppress(OSError):
        file = FileIO(beside(Path(error_file)), "a")
        faulthandler.register(SIGNAL, file=file, all_threads=True)
        for old in _files:
            old.close()
        _files[:] = [file]


def main_thread(text: str) -> list[Frame]:
    """Parse stacks that `faulthandler` has written; return the main thread's frames, innermost first."""
    # The interpreter lists its threads from the youngest to the oldest.
    starts = [match.start() for match in _THREAD.finditer(text)]
    block = text[starts[-1] :] if starts else ""
    return [Frame(file, int(line), name) for file, line, name in _FRAME.findall(block)]


def of(frame: FrameType | None) -> list[Frame]:
    """Return the stack that ends at `frame` as `Frame` objects, innermost first; empty for `None`."""
    frames = []
    while frame is not None:
        code = frame.f_code
        frames.append(Frame(code.co_filename, frame.f_lineno or 0, code.co_name))
        frame = frame.f_back
    return frames


def users(frames: list[Frame]) -> Frame | None:
    """Return the innermost frame of the user's code, or else the innermost frame of all.

    `frames` is a stack, innermost frame first; the result is `None` if it is empty.
    """
    return next((frame for frame in frames if frame.is_users), frames[0] if frames else None)


def _short(file: str) -> str:
    with contextlib.suppress(OSError, ValueError):
        return str(Path(file).relative_to(Path.cwd()))
    return file
