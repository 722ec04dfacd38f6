"""What a logger has been given: the last step, and the names of its values."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from pathlib import Path

#: A logger gets steps in their order: it has all values of those before.
Given = tuple[int, AbstractSet[str]]
NOTHING: Given = (0, frozenset())


def missing(step: int, values: Mapping[str, float], given: Given) -> dict[str, float]:
    """Return those values of a step that are not among what was given."""
    last, names = given
    if step < last:
        return {}
    return {name: one for name, one in values.items() if step > last or name not in names}


def latest(one: Given, other: Given) -> Given:
    """Return what was given by both."""
    if one[0] == other[0]:
        return one[0], one[1] | other[1]
    return max(one, other, key=lambda given: given[0])


class GivenFile:
    """A file that outlives a kill of the process.

    Args:
        path: of the file.

    Raises:
        ValueError: if it is damaged.

    Attributes:
        value: what the logger was given; `None` if the file is new.
        certain: what it had when it was closed: a logger that loses values in a kill has these.
    """

    def __init__(self, path: Path) -> None:
        self.value: Given | None = None
        self.certain = NOTHING
        try:
            content = path.read_bytes()
            if content:
                self.value, self.certain = (
                    (int(step), frozenset(names)) for step, names in json.loads(content)
                )
        except FileNotFoundError:
            content = b""
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({error}); remove it") from error
        self._size = len(content)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def write(self, value: Given, *, closed: bool = False) -> None:
        """Replace what the file says, in one call to the system."""
        certain = value if closed else self.certain
        if (value, certain) == (self.value, self.certain):
            return
        both = [[step, sorted(names)] for step, names in (value, certain)]
        text = json.dumps(both).encode().ljust(self._size)
        os.pwrite(self._file, text, 0)
        self.value, self.certain, self._size = value, certain, len(text)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
