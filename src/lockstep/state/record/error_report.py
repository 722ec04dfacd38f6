"""Write and read the error report of a worker: a JSON file for the worker's launcher."""

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

from lockstep.errors import LockstepError, PeerError, WrongRankError, causes, shortened
from lockstep.state.files.atomic_file import atomic_write
from lockstep.state.record import stacks

#: Parts of messages of torch and Gloo for a connection whose other process has failed.
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
#: Number of characters to which a traceback is shortened for the launcher; the log has all of it.
_TRACEBACK = 1 << 14
#: How torch begins the message of an exception from a DataLoader worker.
_FROM_WORKER = re.compile(r"Caught \w+ in (DataLoader worker process \d+)\.\nOriginal ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The exception that ended a worker: type, text, and the line of the user's code that raised it."""

    rank: int
    exception: str  # name of the type
    message: str  # without the hint; the middle of a long one is left out
    hint: str | None = None
    exit_code: int = 1
    file: str | None = None
    line: int | None = None
    function: str | None = None
    traceback: str = ""  # the middle of a long one is left out
    time: float = 0.0  # by this machine's `time.monotonic`
    consequence: bool = False  # whether another rank's failure caused the exception
    errnos: Sequence[int] = ()  # of OSErrors among the exception and its causes
    wrong: int | None = None  # rank that an audit has found to compute wrongly


def describe(error: BaseException, rank: int, home: str | None) -> Report:
    """Return the report of `error`, with the innermost line of the user's code in its traceback.

    Lines of files below `home`, the directory of the user's script, are preferred to other files.
    """
    file, line, function = _frame(error, home)
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
        wrong=error.rank if isinstance(error, WrongRankError) else None,
    )


def errnos(error: BaseException) -> list[int]:
    """Return the error numbers (`errno`) of all `OSError`s among `error` and its causes."""
    found: list[int] = []
    for cause in causes(error):
        if isinstance(cause, OSError) and cause.errno is not None:
            found.append(cause.errno)
        elif isinstance(cause, OSError) or _FROM_WORKER.match(str(cause)):
            # torch makes the exception of a DataLoader worker anew, from its text.
            found += map(int, _ERRNO.findall(str(cause)))
    return found


def _message(error: BaseException) -> str:
    """Return the text of an exception, with its notes on indented lines below the text."""
    text = error.message if isinstance(error, LockstepError) else str(error)
    message = [text]
    if (worker := _FROM_WORKER.match(text)) is not None:
        # torch has put the DataLoader worker's whole traceback into the message.
        lines = text.rstrip().splitlines()
        below = max(index for index, line in enumerate(lines) if line.startswith("  ")) + 1
        _, _, first = (lines[below:] or [text])[0].partition(": ")
        message = [first, *lines[below + 1 :], f"in {worker[1]}"]
    notes = "\n".join(getattr(error, "__notes__", ())).splitlines()
    return "\n  ".join([*message, *notes])


def is_consequence(error: BaseException) -> bool:
    """Return whether `error` follows from the failure of another rank, such as a closed connection."""
    if isinstance(error, PeerError):
        return True
    from_torch = isinstance(error, (RuntimeError, ConnectionError, TimeoutError))
    return from_torch and blames_peer(str(error))


def blames_peer(text: str) -> bool:
    """Return whether `text` looks like torch's message about a connection to a process that failed."""
    lowered = text.lower()
    return any(phrase in lowered for phrase in _PEER_PHRASES)


def write(report: Report, path: Path) -> None:
    """Write `report` to `path` as JSON, atomically; ignore an `OSError`: the log has the traceback, too."""
    with contextlib.suppress(OSError):
        atomic_write(path, json.dumps(asdict(report)), sync=False)


def read(path: Path) -> Report | None:
    """Return the report in `path`, or `None` if the file does not contain a report."""
    try:
        return Report(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def trim(trace: TracebackType | None, own: str) -> TracebackType | None:
    """Return `trace` without its outermost frames in files below the directory `own`.

    Outermost frames of Python's frozen modules, such as `importlib`, are left out, too.
    """
    while trace is not None and trace.tb_frame.f_code.co_filename.startswith((own, "<frozen ")):
        trace = trace.tb_next
    return trace


def _frame(error: BaseException, home: str | None) -> tuple[str | None, int | None, str | None]:
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
    users = [frame for frame in frames if stacks.is_users(frame.filename)]
    frame = (inside or users or frames)[-1]
    return frame.filename, frame.lineno, frame.name
