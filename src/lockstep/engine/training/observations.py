"""Observations: fingerprints of the script's variables at one time, and differences between two times.

A fingerprint is a short text that differs where two values differ.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple


class VariableId(NamedTuple):
    """Key of a variable of the script: file, function, call of the function, and name.

    `frame`: 0 for a global variable, else a number that identifies the call of the variable's function.
    """

    frame: int
    file: str
    function: str
    name: str  #: with attributes after dots, as `train.dataset.sigma`

    @property
    def key(self) -> str:
        """Name of the variable with its file and function, the same in every process of a run."""
        return f"{self.file.rpartition('/')[2]}:{self.function}:{self.name}"


@dataclass(frozen=True, slots=True)
class Value:
    """Fingerprint (a short text that differs where values differ) of a variable's value, and its source.

    Attributes:
        text: the fingerprint.
        line: line of the script that assigns the variable, or else reads it.
        version: number that changes when a tensor is changed in place or an iterator is read, even if the
            text stays the same.
        kind: `module`; `random` for a generator of random numbers; `data` for a dataset's attribute that
            is a number; `count` for a counting iterator; `attribute` for a module's attribute that a
            `state_dict()` leaves out; `object` where the fingerprint is only the name of a class; `value`
            for all others.
    """

    text: str
    line: int
    version: int = 0
    kind: str = "value"


@dataclass(frozen=True, slots=True)
class VariableChange:
    """A variable whose value has changed, with its fingerprints before and after the change.

    `kind`: as in `Value`. `key`: as in `VariableId.key`.
    """

    name: str
    file: str
    line: int
    before: str
    after: str
    kind: str = "value"
    key: str = ""

    @property
    def is_count(self) -> bool:
        """Whether the variable's value has increased by one, as a counter's does."""
        return self.before.isdecimal() and self.after == str(int(self.before) + 1)

    @property
    def shown(self) -> str:
        """Name of the variable for messages, with its file and line where they are known."""
        place = f" ({Path(self.file).name}:{self.line})" if self.line else ""
        return f"`{self.name}`{place}"


@dataclass(frozen=True, slots=True)
class Observation:
    """Fingerprints of the script's variables at one time, by each variable's file, function and name."""

    values: Mapping[VariableId, Value] = field(default_factory=dict)

    def changes_since(self, earlier: Observation) -> list[VariableChange]:
        """Return the variables whose values differ between `earlier` and this observation.

        Variables that only one of the two observations has are left out.
        """
        return [
            VariableChange(
                place.name, place.file, now.line, before.text, now.text, now.kind, place.key
            )
            for place, now in self.values.items()
            if (before := earlier.values.get(place)) is not None
            and (before.text, before.version) != (now.text, now.version)
        ]

    def changes_since_saved(self, saved: Mapping[str, str]) -> list[VariableChange]:
        """Return the variables whose fingerprints differ from those in `saved`, which `texts` returned."""
        old = {
            place: replace(now, text=saved[place.key])
            for place, now in self.values.items()
            if place.key in saved
        }
        return self.changes_since(Observation(old))

    def texts(self, limit: int) -> dict[str, str]:
        """Return fingerprints by name (`VariableId.key`), as many as fit into `limit` characters."""
        texts: dict[str, str] = {}
        # Last come names of classes, which seldom change.
        for place, value in sorted(self.values.items(), key=lambda one: one[1].kind == "object"):
            limit -= len(place.key) + len(value.text) + 8
            if limit < 0:
                break
            texts[place.key] = value.text
        return texts
