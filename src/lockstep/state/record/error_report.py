"""Error report of a worker to its launcher: one JSON file, written atomically."""

from __future__ import annotations

import contextlib
import json
import re
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from lockstep.errors import LockstepError, PeerError, causes, shortened
from lockstep.state.files.atomic_file import atomic_write
from lockstep.state.record.stacks import Frame

#: What torch and Gloo say when the other end is the one that failed.
_PEER_PHRASES = (
    "connection closed by peer",
    "connection reset by peer",
    "connection refused",
    "broken pipe",
    "timed out waiting",
    "socket timeout",
    "connection was likely closed",
    "failed to recv",
    "no error message found for",
    "rank may have exited",
)
#: How Python writes the number of a system's error.
_ERRNO = re.compile(r"\[Errno (\d+)\]")
#: The most characters of a traceback that the launcher gets; the log has all of them.
_TRACEBACK = 1 << 14
#: How torch begins the message of an exception from a DataLoader worker.
_FROM_WORKER = re.compile(r"Caught \w+ in (DataLoader worker process \d+)\.\nOriginal ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An exception that ended a worker.

    Attributes:
        rank: the worker's rank.
        exception: name of the exception's type.
        message: its text, without the hint; the middle of a long one is left out.
        hint: what to do about it, where it is known.
        exit_code: the code that the worker ends with.
        file: file of the user's frame where it was raised.
        line: line in that file.
        function: function around that line.
        traceback: the traceback as text; the middle of a long one is left out.
        time: when it was, by this machine's `time.monotonic`.
        consequence: whether it tells of another rank's failure rather than of its own.
        errnos: the system's numbers of errors among it and its causes.
    """

    rank: int
    exception: str
    message: str
    hint: str | None = None
    exit_code: int = 1
    file: str | None = None
    line: int | None = None
    function: str | None = None
    traceback: str = ""
    time: float = 0.0
    consequence: bool = False
    errnos: Sequence[int] = ()


def describe(error: BaseException, rank: int, home: str | None) -> Report:
    """Return the report of `error`.

    Args:
        error: what ended the worker, its traceback trimmed to the user's frames.
        rank: the worker's rank.
        home: directory of the user's script; frames below it are preferred.
    """
    file, line, function = _place(error, home)
    hint = error.hint if isinstance(error, LockstepError) else None
    return Report(
        rank=rank,
        exception=type(error).__qualname__,
        message=shortened(_message(error)),
        hint=None if hint is None else shortened(hint),
        exit_code=error.exit_code if isinstance(error, LockstepError) else 1,
        file=file,
        line=line,
        function=function,
        traceback=shortened("".join(traceback.format_exception(error)), _TRACEBACK),
        time=time.monotonic(),
        consequence=is_consequence(error),
        errnos=errnos(error),
    )


def errnos(error: BaseException) -> list[int]:
    """Return the system's numbers of errors among an exception and its causes."""
    found: list[int] = []
    for one in causes(error):
        if isinstance(one, OSError) and one.errno is not None:
            found.append(one.errno)
        elif isinstance(one, OSError) or _FROM_WORKER.match(str(one)):
            # torch makes the exception of a DataLoader worker anew, from its text.
            found += map(int, _ERRNO.findall(str(one)))
    return found


def _message(error: BaseException) -> str:
    """Return what an exception says, and its notes on indented lines below."""
    text = error.message if isinstance(error, LockstepError) else str(error)
    notes = "\n".join(getattr(error, "__notes__", ())).splitlines()
    return "\n  ".join([*_said_by_worker(text), *notes])


def _said_by_worker(text: str) -> list[str]:
    """Return the message of an exception alone, where torch has put a worker's whole traceback into it."""
    worker = _FROM_WORKER.match(text)
    if worker is None:
        return [text]
    lines = text.rstrip().splitlines()
    below = max(index for index, line in enumerate(lines) if line.startswith("  ")) + 1
    _, _, said = (lines[below:] or [text])[0].partition(": ")
    return [said, *lines[below + 1 :], f"in {worker[1]}"]


def is_consequence(error: BaseException) -> bool:
    """Return whether `error` says that another rank failed."""
    if isinstance(error, PeerError):
        return True
    from_torch = isinstance(error, (RuntimeError, ConnectionError, TimeoutError))
    return from_torch and blames_peer(str(error))


def blames_peer(text: str) -> bool:
    """Return whether `text` is what torch says when the other end is the one that failed."""
    lowered = text.lower()
    return any(phrase in lowered for phrase in _PEER_PHRASES)


def write(report: Report, path: Path) -> None:
    """Write `report` to `path` atomically; a full disk leaves the traceback in the log alone."""
    with contextlib.suppress(OSError):
        atomic_write(path, json.dumps(asdict(report)), sync=False)


def read(path: Path) -> Report | None:
    """Return the report in `path`, or `None` where there is none of ours."""
    try:
        return Report(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def trim(trace: TracebackType | None, own: str) -> TracebackType | None:
    """Return `trace` without the launcher's frames at its top.

    Args:
        trace: a traceback, outermost frame first.
        own: directory of the frames to drop.
    """
    while trace is not None and _is_ours(trace, own):
        trace = trace.tb_next
    return trace


def _is_ours(trace: TracebackType, own: str) -> bool:
    file = trace.tb_frame.f_code.co_filename
    return file.startswith((own, "<frozen "))


def _place(error: BaseException, home: str | None) -> tuple[str | None, int | None, str | None]:
    if isinstance(error, SyntaxError) and error.filename:
        return error.filename, error.lineno, None
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return None, None, None
    inside = [
        frame
        for frame in frames
        if home and frame.filename.startswith(home) and "site-packages" not in frame.filename
    ]
    users = [f for f in frames if Frame(f.filename, f.lineno or 0, f.name).is_users]
    frame = (inside or users or frames)[-1]
    return frame.filename, frame.lineno, frame.name
