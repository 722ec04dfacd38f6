"""Comparison of two results: refusal of results that do not compare, and their ratios."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.tools.bench.results import Row, add_speedups, rate

#: Version of the files of results.
FORMAT = 1
#: What a file of results says it is: measured here, or copied from a publication.
RESULT, PUBLISHED = "result", "published"
#: By how much batches may differ that are taken for equal.
_ALIKE = 0.02
#: What a run of several ranks takes where no strategy is named.
_DEFAULT = "ddp"
_NUMBERS = ("samples_per_second", "step_seconds", "wall_seconds")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two results."""

    name: str
    by_rate: bool  # otherwise by speed-up and efficiency only
    rows: list[Row]  # one per layout that either result has
    notes: list[str]

    def as_json(self) -> dict[str, Any]:
        """Return what the file of results has under `comparison`."""
        return {
            "with": self.name,
            "by": "rate" if self.by_rate else "speed-up",
            "rows": self.rows,
            "notes": self.notes,
        }


def shipped() -> list[str]:
    """Return the names of the tables that come with Lockstep."""
    files = resources.files("lockstep.tools.bench").joinpath("tables").iterdir()
    return sorted(one.name.removesuffix(".json") for one in files if one.name.endswith(".json"))


def load(name: str) -> dict[str, Any]:
    """Return the results in a file, or in a table that comes with Lockstep.

    Raises:
        UsageError: if there is none, or it cannot be read.
    """
    if name in shipped():
        text = (
            resources.files("lockstep.tools.bench")
            .joinpath("tables", f"{name}.json")
            .read_text("utf-8")
        )
    else:
        text = _text(Path(name))
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _unreadable(name, f"it is no JSON: {error}") from None
    _check(name, content)
    add_speedups(content["results"])
    return dict(content)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        what = error.strerror if isinstance(error, OSError) else "it is no text"
        raise UsageError(
            f"--compare {path}: {what}; expected a file that `lockstep bench --json` wrote",
            hint=f"or one of the tables that come with Lockstep: {', '.join(shipped())}",
        ) from None


def _unreadable(name: str, what: str) -> UsageError:
    return UsageError(
        f"--compare {name}: {what}; expected a file that `lockstep bench --json` wrote",
        hint="measure it again with --json FILE",
    )


def _check(name: str, content: Any) -> None:
    """Refuse what is no result, and that of a newer version."""
    if not isinstance(content, dict) or not isinstance(content.get("format"), int):
        raise _unreadable(name, "it is no file of results")
    if content["format"] > FORMAT:
        raise UsageError(
            f"--compare {name} has format {content['format']}; this version reads up to {FORMAT}",
            hint="a newer Lockstep wrote it, and reads it",
        )
    rows, script = content.get("results"), content.get("script")
    if not isinstance(rows, list) or not rows or not all(map(_is_row, rows)):
        raise _unreadable(name, "its results are not rows with ranks and numbers")
    if not isinstance(script, dict) or not isinstance(script.get("name"), str):
        raise _unreadable(name, "it does not name a script")
    if not isinstance(content.get("machine"), dict):
        raise _unreadable(name, "it does not name a machine")


def _is_row(one: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(one.get("ranks"), int) or one["ranks"] < 1:
        return False
    values = [one.get(name) for name in _NUMBERS]
    return all(value is None or (_is_number(value) and value > 0) for value in values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_scripts(script: Mapping[str, Any], other: Mapping[str, Any], name: str) -> None:
    """Refuse the results of another script or of other arguments; a published table always is one.

    Raises:
        UsageError: naming what differs.
    """
    if other.get("kind") == PUBLISHED:
        return
    theirs = other["script"]
    differ = [
        f"{what}: {script.get(what)!r} here, {theirs.get(what)!r} there"
        for what in ("name", "arguments")
        if script.get(what) != theirs.get(what)
    ]
    if differ:
        raise _do_not_compare(name, differ)


def compare(own: Mapping[str, Any], other: Mapping[str, Any], name: str) -> Comparison:
    """Return two results beside each other.

    Raises:
        UsageError: if they do not compare, naming what differs.
    """
    check_scripts(own["script"], other, name)
    pairs = _pairs(own["results"], other["results"])
    differ = [
        f"samples of a step on {mine['ranks']} ranks: {mine['batch']:g} here, {theirs['batch']:g} there"
        for mine, theirs in pairs
        if mine and theirs and _differ(mine.get("batch"), theirs.get("batch"))
    ]
    if differ:
        raise _do_not_compare(name, differ)
    published = other.get("kind") == PUBLISHED
    by_rate = not published and all(
        mine.get("measured_by") == theirs.get("measured_by")
        for mine, theirs in pairs
        if mine and theirs and mine.get("measured_by") and theirs.get("measured_by")
    )
    rows = [_row(mine, theirs, by_rate=by_rate) for mine, theirs in pairs]
    return Comparison(name, by_rate, rows, _notes(own, other, name, by_rate=by_rate))


def _do_not_compare(name: str, differ: Sequence[str]) -> UsageError:
    return UsageError(
        f"--compare {name}: the two results do not compare: {'; '.join(differ)}",
        hint="measure the same script with the same arguments and the same batch",
    )


def _differ(mine: float | None, theirs: float | None) -> bool:
    return mine is not None and theirs is not None and abs(mine - theirs) > _ALIKE * theirs


def _pairs(own: Sequence[Row], other: Sequence[Row]) -> list[tuple[Row | None, Row | None]]:
    """Return rows of one layout beside each other; those that only one has stay alone."""
    left = list(other)
    pairs: list[tuple[Row | None, Row | None]] = []
    for mine in own:
        theirs = next((one for one in left if _same_layout(mine, one)), None)
        if theirs is not None and theirs["ranks"] > 1:
            left.remove(theirs)
        pairs.append((mine, theirs))
    taken = [theirs for _, theirs in pairs if theirs is not None]
    return pairs + [(None, theirs) for theirs in left if theirs not in taken]


def _same_layout(mine: Row, theirs: Row) -> bool:
    """Return whether two rows are of one layout. On one rank a strategy need not have a name."""
    if mine["ranks"] != theirs["ranks"]:
        return False
    if mine["ranks"] == 1 and theirs.get("strategy") is None:
        return True
    same = _strategy(mine) == _strategy(theirs)
    return same and theirs.get("exchange") in (None, mine["exchange"])


def _strategy(one: Row) -> str:
    return str(one.get("strategy") or one.get("strategy_used") or _DEFAULT)


def _row(mine: Row | None, theirs: Row | None, *, by_rate: bool) -> Row:
    names = ("strategy", "exchange", "ranks")
    row: Row = {name: (theirs or {}).get(name) or (mine or {}).get(name) for name in names}
    for side, one in (("here", mine), ("there", theirs)):
        for name in ("samples_per_second", "wall_seconds", "speedup", "efficiency"):
            row[f"{name}_{side}"] = None if one is None else one.get(name)
    both = mine is not None and theirs is not None and rate(mine) and rate(theirs)
    row["ratio"] = float(f"{rate(mine) / rate(theirs):.6g}") if both and by_rate else None  # type: ignore[arg-type]
    return row


def _notes(
    own: Mapping[str, Any], other: Mapping[str, Any], name: str, *, by_rate: bool
) -> list[str]:
    if other.get("kind") == PUBLISHED:
        program = f"{name} is a table of another program, {other['script']['name']}"
        source = [f"its source: {other['source']}"] if other.get("source") else []
        return [f"{program}: compared by speed-up and efficiency", *source]
    said = [] if by_rate else ["one is measured by steps, one by wall time: compared by speed-up"]
    if own["script"].get("sha256") != other["script"].get("sha256"):
        said.append("the script has changed between the two")
    return said + [
        f"{what} differs: {mine} here, {theirs} there"
        for what, mine, theirs in _circumstances(own, other)
        if mine != theirs
    ]


def _circumstances(
    own: Mapping[str, Any], other: Mapping[str, Any]
) -> list[tuple[str, object, object]]:
    """Return what two results may differ in, with both values."""
    mine, theirs = own["machine"], other["machine"]
    named = [(what, mine.get(what), theirs.get(what)) for what in ("processor", "cores")]
    named.append(("device", _devices(own), _devices(other)))
    versions = (mine.get("versions") or {}, theirs.get("versions") or {})
    return (
        named
        + [
            (f"version of {what}", versions[0].get(what), versions[1].get(what))
            for what in ("python", "torch", "lockstep")
        ]
        + [("options", own.get("options"), other.get("options"))]
    )


def _devices(content: Mapping[str, Any]) -> str:
    found = {name for row in content["results"] for name in row.get("devices") or ()}
    return ", ".join(sorted(found)) or "not known"
