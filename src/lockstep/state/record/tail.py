"""Tail of files that a run still writes: the content since the last read."""

from __future__ import annotations

from pathlib import Path

from lockstep.errors import RunDirectoryError
from lockstep.state.record.reading import Event, parse

#: Bytes of a long file that the first look takes, from its end.
_FIRST = 1 << 20


class Tail:
    """The lines of a file, as they come; a line is seen when it is whole.

    The first look at a long file begins near its end.

    Args:
        path: a file; it may come later, and may begin anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._place: int | None = None
        self._rest = b""

    def lines(self) -> list[str]:
        """Return the lines that have come since the last look."""
        try:
            with self._path.open("rb") as file:
                size = file.seek(0, 2)
                cut = self._begin(size)
                file.seek(self._place or 0)
                found = self._rest + file.read(size - (self._place or 0))
        except OSError:
            return []
        self._place = size
        *whole, self._rest = found.split(b"\n")
        return [line.decode(errors="replace") for line in whole[cut:]]

    def _begin(self, size: int) -> int:
        """Choose where to read from; return how many lines to pass over, since the first is a part."""
        if self._place is not None and size >= self._place:
            return 0
        self._rest = b""
        self._place = max(0, size - _FIRST)
        return 1 if self._place else 0


class EventTail:
    """The events of a file, as they come.

    Args:
        path: a file of events.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._tail = path, Tail(path)

    def events(self) -> list[Event]:
        """Return the events that have come since the last look.

        Raises:
            RunDirectoryError: if the file holds something else than events.
        """
        try:
            return [event for line in self._tail.lines() if (event := parse(line)) is not None]
        except TypeError as error:
            raise RunDirectoryError(f"{self._path} cannot be read: {error}") from None
