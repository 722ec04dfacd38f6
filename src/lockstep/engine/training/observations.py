"""Observations: what variables hold at one time, and how two of them differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple


class Place(NamedTuple):
    """Where a variable is.

    Attributes:
        frame: tells frames of one function from each other; 0 for variables of a module.
        file: of the code.
        function: the name of it.
        name: of the variable, with attributes after dots.
    """

    frame: int
    file: str
    function: str
    name: str

    @property
    def key(self) -> str:
        """The same in another process."""
        return f"{self.file.rpartition('/')[2]}:{self.function}:{self.name}"


@dataclass(frozen=True, slots=True)
class Value:
    """What a variable holds.

    Attributes:
        text: fingerprint of the value.
        line: where the loop writes it, or reads it.
        version: what changes with the value in this process, where the text may not.
        kind: `object` where the text is that of its class, `module`, `random` for a generator of random
            numbers, `data` for a number of a dataset, `count` for a counting iterator, `value` for all
            else; a user of this class may have others.
    """

    text: str
    line: int
    version: int = 0
    kind: str = "value"


@dataclass(frozen=True, slots=True)
class Change:
    """A variable that has another value than before; `key` is the same in another process."""

    name: str
    file: str
    line: int
    before: str
    after: str
    kind: str = "value"
    key: str = ""

    @property
    def is_count(self) -> bool:
        """Whether the value is one more than it was."""
        return self.before.isdecimal() and self.after == str(int(self.before) + 1)

    @property
    def shown(self) -> str:
        """The variable, and its line where it has one, for messages."""
        place = f" ({Path(self.file).name}:{self.line})" if self.line else ""
        return f"`{self.name}`{place}"


@dataclass(frozen=True, slots=True)
class Observation:
    """What variables hold at one time."""

    values: Mapping[Place, Value] = field(default_factory=dict)

    def changes_since(self, earlier: Observation) -> list[Change]:
        """Return the variables that both have seen, with different values."""
        return [
            Change(place.name, place.file, now.line, before.text, now.text, now.kind, place.key)
            for place, now in self.values.items()
            if (before := earlier.values.get(place)) is not None
            and (before.text, before.version) != (now.text, now.version)
        ]

    def changes_since_saved(self, saved: Mapping[str, str]) -> list[Change]:
        """Return the variables that have other fingerprints than in `saved`, which `texts` has returned."""
        return [
            Change(place.name, place.file, now.line, before, now.text, now.kind, place.key)
            for place, now in self.values.items()
            if (before := saved.get(place.key)) is not None and before != now.text
        ]

    def texts(self, limit: int) -> dict[str, str]:
        """Return fingerprints by name, of together at most `limit` characters."""
        texts: dict[str, str] = {}
        # What has none, but for its class, comes last.
        for place, value in sorted(self.values.items(), key=lambda one: one[1].kind == "object"):
            limit -= len(place.key) + len(value.text) + 8
            if limit < 0:
                break
            texts[place.key] = value.text
        return texts
