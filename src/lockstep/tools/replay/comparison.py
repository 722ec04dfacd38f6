"""Compare a replay with its run's records: samples, bits of losses, hashes of gradients and parameters."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.state.record.provenance import changed_files
from lockstep.state.record.steps import KINDS, LOSS, Entry, Key
from lockstep.tools.replay.recorded import RecordedRun
from lockstep.tools.replay.replaying import ReplayOptions, ReplayResults

#: Formats of `struct` for losses, by number of bytes; two bytes are float16 or bfloat16, and not unpacked.
_FORMATS = {4: "<f", 8: "<d"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """The records of a run beside the results of its replay, with methods that compare the two."""

    run: RecordedRun
    asked: ReplayOptions
    replayed: ReplayResults

    @property
    def difference(self) -> str | None:
        """Description of the first difference between records and replay; `None` if there is none."""
        recorded, again = self.run.entries, self.replayed.entries
        span = range(self.replayed.begin + 1, self.asked.until + 1)
        for key in sorted({key for key in (*recorded, *again) if key.step in span}):
            one, other = recorded.get(key), again.get(key)
            place = f"step {key.step}" + f", replica {key.replica}" * (key.kind == LOSS)
            if one is None:  # hashed more often, or the record is incomplete
                continue
            if other is None:
                return (
                    f"{place}: the replay has no {KINDS[key.kind]}, recorded is {shown(key, one)}"
                )
            if one != other:
                samples = self.replayed.samples.get((key.step, key.replica), [])
                which = f", now {samples[:8]}" * (one.samples != other.samples and samples != [])
                return unequal(key, one, other, ("recorded", "in the replay")) + which
        return None

    @property
    def compared(self) -> int:
        """Number of values of the requested steps that both the records and the replay have."""
        both = self.run.entries.keys() & self.replayed.entries.keys()
        return sum(self.asked.step <= key.step <= self.asked.until for key in both)

    @property
    def same(self) -> bool:
        """Whether the replay has all recorded values of its steps with the same bits, and at least one."""
        return self.difference is None and self.compared > 0

    def notes(self) -> list[str]:
        """Return a line of text for each change of versions, environment, data or sources after the run."""
        content, now = self.run.content, self.replayed.content
        changed = changed_files(content.get("provenance", {}).get("sources", {}))
        notes = [f"{file} has changed since the run" for file in changed]
        return unlike(content, now, ("recorded", "now")) + notes

    def as_json(self) -> dict[str, Any]:
        """Return the comparison in JSON's types, for `lockstep replay --json`."""
        asked, difference = self.asked, self.difference
        return {
            "same": self.same,
            "step": asked.step,
            "until": asked.until,
            "begin": self.replayed.begin,
            "samples": [
                {"step": step, "replica": replica, "samples": samples}
                for (step, replica), samples in sorted(self.replayed.samples.items())
                if asked.replica in (None, replica)
            ],
            "losses": [
                self._both(key) | {"replica": key.replica} for key in self._keys(losses=True)
            ],
            "hashes": [
                self._both(key) | {"of": KINDS[key.kind]} for key in self._keys(losses=False)
            ],
            "compared": self.compared,
            "difference": difference,
            "notes": self.notes(),
        }

    def _keys(self, *, losses: bool) -> Iterator[Key]:
        for key in sorted(self.replayed.entries):
            is_shown = self.asked.replica in (None, key.replica) or not losses
            if self.asked.step <= key.step <= self.asked.until and (key.kind == LOSS) == losses:
                yield from [key] * is_shown

    def _both(self, key: Key) -> dict[str, Any]:
        recorded, own = self.run.entries.get(key), self.replayed.entries[key]
        bits = None if recorded is None else recorded.value.hex()
        value = {"value": number(own.value)} if key.kind == LOSS else {}
        return {"step": key.step, **value, "bits": own.value.hex(), "recorded": bits}


def number(value: bytes) -> float | str | None:
    """Convert the bytes of a loss to a number, or to text if the loss is infinite or NaN.

    `value` is little-endian, in float32 or float64. For a value of another size, such as float16, return
    `None`.
    """
    if len(value) not in _FORMATS:
        return None
    found: float = struct.unpack(_FORMATS[len(value)], value)[0]
    return found if math.isfinite(found) else str(found)


def shown(key: Key, entry: Entry) -> str:
    """Return the value of an entry of a step record as text: a loss with its bits, or a hash.

    `key` is the key of the entry; it says whether the value is a loss.
    """
    value = number(entry.value) if key.kind == LOSS else None
    return entry.value.hex() if value is None else f"{value} ({entry.value.hex()})"


def unequal(key: Key, one: Entry, other: Entry, where: tuple[str, str]) -> str:
    """Return a text on the difference between two entries of step records with the same `key`.

    `where` has a word for each of the two entries, such as `recorded` and `in the replay`.
    """
    place = f"step {key.step}" + f", replica {key.replica}" * (key.kind == LOSS)
    if one.samples != other.samples:
        return f"{place}: other samples {where[0]} than {where[1]}"
    both = f"{shown(key, one)} {where[0]}, {shown(key, other)} {where[1]}"
    return f"{place}: the {KINDS[key.kind]}: {both}"


def unlike(one: Mapping[str, Any], other: Mapping[str, Any], where: tuple[str, str]) -> list[str]:
    """Return lines of text on the differences between two `run.json`, `one` and `other`.

    The identity, versions, environment, commit and data are compared. `where` has a word for each of the
    two, such as `recorded` and `now`.
    """
    identities = one.get("identity", {}), other.get("identity", {})
    origins = one.get("provenance", {}), other.get("provenance", {})
    lines = changed(*identities, where)
    for pair, name in (identities, "versions"), (origins, "environment"), (origins, "git"):
        before, after = (part.get(name) for part in pair)
        if before and after:
            lines += changed(before, after, where)
    for loader, parts in one.get("data", {}).items():
        own = other.get("data", {}).get(loader, parts)
        lines += [f"the data of loader {loader}: {line}" for line in changed(parts, own, where)]
    return lines


def changed(
    before: Mapping[str, Any], after: Mapping[str, Any], where: tuple[str, str]
) -> list[str]:
    """Return a line of text for each key whose values differ in two mappings.

    Values that are mappings are not compared. `where` has a word for each of the two mappings, such as
    `recorded` and `now`.
    """
    return [
        f"{name}: {before.get(name)} {where[0]}, {after.get(name)} {where[1]}"
        for name in dict.fromkeys([*before, *after])
        if before.get(name) != after.get(name) and not isinstance(before.get(name), dict)
    ]
