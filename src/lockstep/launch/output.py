"""`Output`: copies workers' output to a log file for each rank, and to the terminal for selected ranks.

A rank that is not shown writes directly to its log file. A rank that is shown writes to a pipe, or to a
pseudo-terminal if the launcher's stream is a terminal (so that progress bars work); a thread copies the
data to the terminal and to the log file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import struct
import sys
import termios
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from lockstep.errors import RunDirectoryError

_CHUNK = 1 << 16
#: Seconds that the terminal has to accept the last output.
_PATIENCE = 30.0


@dataclass(slots=True)
class _TextSink:
    """Sink that writes to a Python text stream without a descriptor, as in a notebook."""

    stream: TextIO

    def write(self, data: bytes) -> None:
        """Write `data`, decoded as text; drop it after an error."""
        with contextlib.suppress(OSError, ValueError):
            self.stream.write(data.decode(errors="replace"))
            self.stream.flush()


@dataclass(slots=True)
class _Sink:
    """Sink that writes to a file descriptor, until its first error: a closed terminal, a full disk."""

    descriptor: int | None

    def write(self, data: bytes) -> None:
        while data and self.descriptor is not None:
            try:
                data = data[os.write(self.descriptor, data) :]
            except BlockingIOError:  # another process made the pipe non-blocking
                _wait(self.descriptor, events=select.POLLOUT)
            except OSError:
                self.descriptor = None

    def duplicate(self) -> int:
        """Return a duplicate of the descriptor, or of the null device after an error."""
        if self.descriptor is None:
            return os.open(os.devnull, os.O_WRONLY)
        return os.dup(self.descriptor)


#: Destination of bytes whose `write` never raises.
Sink = _TextSink | _Sink


@dataclass(slots=True)
class _Cursor:
    """State of the terminal; `in_line` says that the last output did not end with a newline.

    Progress bars write such output.
    """

    in_line: bool = False


_CURSOR = _Cursor()


@dataclass(slots=True)
class _Source:
    """An output stream of a worker, with the sinks that receive its bytes.

    Sink `log` is the rank's log file, and `shown` the terminal, where each line begins with `prefix`.
    """

    shown: Sink
    log: Sink
    prefix: bytes
    rest: bytearray = field(default_factory=bytearray)

    def feed(self, data: bytes) -> None:
        self.log.write(data)
        if not self.prefix:
            self.shown.write(data)
            if _is_terminal(self.shown):
                _CURSOR.in_line = not data.endswith((b"\n", b"\r"))
            return
        self.rest += data
        whole, newline, rest = self.rest.rpartition(b"\n")
        self.rest = bytearray(rest)
        if newline:
            self._show(bytes(whole))

    def finish(self) -> None:
        """Write the last line to the terminal if the worker ended it without a newline."""
        if self.rest:
            self._show(bytes(self.rest))
            self.rest.clear()

    def _show(self, lines: bytes) -> None:
        self.shown.write(b"".join(self.prefix + line + b"\n" for line in lines.split(b"\n")))


def say(text: str) -> None:
    """Print a message of the launcher to standard error.

    The message begins on a new line, even if a rank's progress bar has left the terminal in a line.
    """
    begin = "\n" * (_CURSOR.in_line and sys.stderr.isatty())
    _CURSOR.in_line = False
    # A single write, so that no output of ranks comes in between.
    _standard(sys.stderr).write(f"{begin}{text}\n".encode(errors="backslashreplace"))


class Output:
    """Copies the output of all workers of a launch to log files and the terminal, in a thread."""

    def __init__(self) -> None:
        self._terminal = (_standard(sys.stdout), _standard(sys.stderr))
        self._logs: dict[Path, _Sink] = {}
        self._sources: dict[int, _Source] = {}
        self._lock = threading.Lock()
        self._wake, self._wake_writer = os.pipe()
        self._finishing = False
        self._thread = threading.Thread(target=self._pump, name="lockstep-output", daemon=True)
        self._thread.start()

    def open(self, log: Path, prefixes: tuple[str | None, str | None]) -> tuple[int, int]:
        """Return descriptors for a worker's standard output and error; the caller closes them.

        Args:
            log: log file for both streams.
            prefixes: prefix of lines on the terminal for each stream; `None` for a hidden stream.

        Raises:
            RunDirectoryError: if the log file cannot be written.
        """
        if log not in self._logs:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            try:
                self._logs[log] = _Sink(os.open(log, flags, 0o600))
            except OSError as error:
                raise RunDirectoryError(
                    f"the log file {log} cannot be written: {error.strerror}",
                    hint="--run-dir DIR names another place",
                ) from None
        sink = self._logs[log]
        terminals = [
            prefix == "" and _is_terminal(shown)
            for prefix, shown in zip(prefixes, self._terminal, strict=True)
        ]
        if all(terminals):
            worker = self._add(_open_terminal(1), 0, b"", sink)
            return worker, os.dup(worker)
        descriptors = []
        for index, (prefix, terminal) in enumerate(zip(prefixes, terminals, strict=True)):
            if prefix is None:
                descriptors.append(sink.duplicate())
                continue
            ends = _open_terminal(index + 1) if terminal else os.pipe()
            descriptors.append(self._add(ends, index, prefix.encode(), sink))
        return descriptors[0], descriptors[1]

    def close(self) -> None:
        """Copy the remaining output, end the thread, close the log files; all workers must have ended."""
        self._finishing = True
        self._poke()
        self._thread.join(_PATIENCE)
        if self._thread.is_alive():  # the terminal is blocked; the thread ends with the process
            return
        for sink in self._logs.values():
            if sink.descriptor is not None:
                os.close(sink.descriptor)
        for descriptor in (self._wake, self._wake_writer):
            os.close(descriptor)

    def _add(self, ends: tuple[int, int], index: int, prefix: bytes, log: _Sink) -> int:
        reader, writer = ends
        os.set_blocking(reader, False)
        with self._lock:
            self._sources[reader] = _Source(self._terminal[index], log, prefix)
        self._poke()
        return writer

    def _poke(self) -> None:
        os.write(self._wake_writer, b"\0")

    def _pump(self) -> None:
        while True:
            with self._lock:
                readers = list(self._sources)
            finishing = self._finishing
            ready = _wait(self._wake, *readers, timeout=0 if finishing else None)
            if self._wake in ready:
                os.read(self._wake, _CHUNK)
            active = [reader for reader in ready if reader != self._wake and self._copy(reader)]
            if finishing and not active:
                break
        for reader in list(self._sources):
            self._drop(reader)

    def _copy(self, reader: int) -> bool:
        """Copy available data from the descriptor `reader`; return whether there was any."""
        try:
            data = os.read(reader, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:  # a pseudo-terminal whose other end is closed
            data = b""
        if not data:
            self._drop(reader)
            return False
        self._sources[reader].feed(data)
        return True

    def _drop(self, reader: int) -> None:
        with self._lock:
            source = self._sources.pop(reader)
        source.finish()
        os.close(reader)


def _wait(
    *descriptors: int, events: int = select.POLLIN, timeout: float | None = None
) -> list[int]:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, events)
    return [descriptor for descriptor, _ in poll.poll(timeout)]


def _standard(stream: TextIO) -> Sink:
    """Return the sink for `stream`, which is `sys.stdout`, `sys.stderr` or an object that replaces one."""
    is_own = stream in (sys.__stdout__, sys.__stderr__)
    return _Sink(stream.fileno()) if is_own else _TextSink(stream)


def _is_terminal(sink: Sink) -> bool:
    return isinstance(sink, _Sink) and sink.descriptor is not None and os.isatty(sink.descriptor)


def _open_terminal(like: int) -> tuple[int, int]:
    """Open a raw pseudo-terminal with the window size of the terminal `like`; return both descriptors."""
    reader, writer = pty.openpty()
    mode = termios.tcgetattr(writer)
    mode[1] &= ~termios.OPOST
    mode[3] &= ~(termios.ECHO | termios.ICANON)
    termios.tcsetattr(writer, termios.TCSANOW, mode)
    with contextlib.suppress(OSError):
        size = fcntl.ioctl(like, termios.TIOCGWINSZ, struct.pack("HHHH", 0, 0, 0, 0))
        fcntl.ioctl(writer, termios.TIOCSWINSZ, size)
    return reader, writer
