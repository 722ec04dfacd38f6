"""Compare the results of two benchmarks, by samples per second or by speed-up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from lockstep.errors import UsageError
from lockstep.tools.bench.results import Row, add_speedups, devices, rate
from lockstep.tools.quantities import rounded

#: Version of the files of results.
FORMAT = 1
#: Kinds of results files: measured by `lockstep bench`, or copied from a publication.
RESULT, PUBLISHED = "result", "published"
#: Relative difference up to which batch sizes count as equal.
_ALIKE = 0.02
#: The strategy of several ranks if a row names none.
_DEFAULT = "ddp"
_TABLES = resources.files("lockstep.tools.bench").joinpath("tables")


def shipped() -> list[str]:
    """Return the names of the results files that are part of the package Lockstep."""
    names = (file.name for file in _TABLES.iterdir())
    return sorted(name.removesuffix(".json") for name in names if name.endswith(".json"))


def load(name: str) -> dict[str, Any]:
    """Read the JSON results file `name`, a path or the name of a file that is part of Lockstep.

    Speed-ups are added to its rows.

    Raises:
        UsageError: if the file does not exist or cannot be read.
    """
    file = _TABLES.joinpath(f"{name}.json") if name in shipped() else Path(name)
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(name, error.strerror or str(error)) from None
    except UnicodeDecodeError:
        raise _unreadable(name, "it is no text") from None
    except (ValueError, RecursionError) as error:
        raise _unreadable(name, f"it is no JSON: {error}") from None
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
    add_speedups(rows)
    return content


def _unreadable(name: str, why: str) -> UsageError:
    return UsageError(
        f"--compare {name}: {why}; expected a file that `lockstep bench --json` wrote",
        hint=f"or a table that comes with Lockstep: {', '.join(shipped())}",
    )


def _is_row(row: Any) -> bool:
    if not isinstance(row, dict) or not isinstance(row.get("ranks"), int) or row["ranks"] < 1:
        return False
    values = [row.get(name) for name in ("samples_per_second", "step_seconds", "wall_seconds")]
    return all(
        value is None
        or (isinstance(value, int | float) and not isinstance(value, bool) and value > 0)
        for value in values
    )


def check_scripts(script: Mapping[str, Any], other: Mapping[str, Any], name: str) -> None:
    """Raise an error unless the script in the results `other` has the name and arguments of `script`.

    `script` describes the script to measure, as in a results file. Results copied from a publication are
    not checked. `name` names `other` in error messages.

    Raises:
        UsageError: naming each difference.
    """
    theirs = other["script"]
    differ = [
        f"{what}: {script.get(what)!r} here, {theirs.get(what)!r} there"
        for what in ("name", "arguments")
        if script.get(what) != theirs.get(what)
    ]
    if differ and other.get("kind") != PUBLISHED:
        raise _do_not_compare(name, differ)


def _do_not_compare(name: str, differ: Sequence[str]) -> UsageError:
    return UsageError(
        f"--compare {name}: the two results do not compare: {'; '.join(differ)}",
        hint="measure the same script with the same arguments and the same batch",
    )


def compare(own: Mapping[str, Any], other: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Compare the results `own` with `other`; return the field `comparison` of the results file.

    Samples per second are compared if both were measured in the same way, otherwise speed-ups and
    efficiencies. `name` names `other` in the comparison and in error messages.

    Raises:
        UsageError: if the results cannot be compared, naming each difference.
    """
    check_scripts(own["script"], other, name)
    pairs = _pairs(own["results"], other["results"])
    both = [(mine, theirs) for mine, theirs in pairs if mine and theirs]
    differ = [
        f"samples of a step on {mine['ranks']} ranks: {mine['batch']:g} here, {theirs['batch']:g} there"
        for mine, theirs in both
        if mine.get("batch") is not None and theirs.get("batch") is not None
        if abs(mine["batch"] - theirs["batch"]) > _ALIKE * theirs["batch"]
    ]
    if differ:
        raise _do_not_compare(name, differ)
    measured = [(mine.get("measured_by"), theirs.get("measured_by")) for mine, theirs in both]
    by_rate = other.get("kind") != PUBLISHED and all(a == b for a, b in measured if a and b)
    return {
        "with": name,
        "by": "rate" if by_rate else "speed-up",
        "rows": [_row(mine, theirs, by_rate=by_rate) for mine, theirs in pairs],
        "notes": _notes(own, other, name, by_rate=by_rate),
    }


def _pairs(own: Sequence[Row], other: Sequence[Row]) -> list[tuple[Row | None, Row | None]]:
    """Return pairs of rows, one of each result, that have the same ranks, strategy and exchange.

    A row without a counterpart in the other result is paired with `None`.
    """
    left = list(other)
    pairs: list[tuple[Row | None, Row | None]] = []
    for mine in own:
        theirs = next((row for row in left if _same_layout(mine, row)), None)
        if theirs is not None and theirs["ranks"] > 1:
            left.remove(theirs)
        pairs.append((mine, theirs))
    taken = [theirs for _, theirs in pairs if theirs is not None]
    return pairs + [(None, theirs) for theirs in left if theirs not in taken]


def _same_layout(mine: Row, theirs: Row) -> bool:
    """Whether two rows of results have the same ranks, strategy and exchange.

    In `theirs` a missing exchange equals any exchange, and on one rank a missing strategy any strategy.
    """
    if mine["ranks"] != theirs["ranks"]:
        return False
    if mine["ranks"] == 1 and theirs.get("strategy") is None:
        return True
    named = [row.get("strategy") or row.get("strategy_used") or _DEFAULT for row in (mine, theirs)]
    return named[0] == named[1] and theirs.get("exchange") in (None, mine["exchange"])


def _row(mine: Row | None, theirs: Row | None, *, by_rate: bool) -> Row:
    names = ("strategy", "exchange", "ranks")
    row: Row = {name: (theirs or {}).get(name) or (mine or {}).get(name) for name in names}
    for side, found in (("here", mine or {}), ("there", theirs or {})):
        for name in ("samples_per_second", "wall_seconds", "speedup", "efficiency"):
            row[f"{name}_{side}"] = found.get(name)
    here, there = rate(mine or {}), rate(theirs or {})
    row["ratio"] = rounded(here / there) if by_rate and here and there else None
    return row


def _notes(
    own: Mapping[str, Any], other: Mapping[str, Any], name: str, *, by_rate: bool
) -> list[str]:
    if other.get("kind") == PUBLISHED:
        program = f"{name} is a table of another program, {other['script']['name']}"
        source = [f"its source: {other['source']}"] if other.get("source") else []
        return [f"{program}: compared by speed-up and efficiency", *source]
    notes = []
    if not by_rate:
        notes.append("one is measured by steps, one by wall time: compared by speed-up")
    if own["script"].get("sha256") != other["script"].get("sha256"):
        notes.append("the script has changed between the two")
    here, there = _circumstances(own), _circumstances(other)
    return notes + [
        f"{what} differs: {here[what]} here, {there[what]} there"
        for what in here
        if here[what] != there[what]
    ]


def _circumstances(content: Mapping[str, Any]) -> dict[str, object]:
    """Return the processor, cores, device, versions and options of the benchmark with these results."""
    machine = content["machine"]
    versions = machine.get("versions") or {}
    return {
        "processor": machine.get("processor"),
        "cores": machine.get("cores"),
        "device": devices(content["results"]),
        **{f"version of {one}": versions.get(one) for one in ("python", "torch", "lockstep")},
        "options": content.get("options"),
    }
