"""Compare two recorded runs, and replay both to find the step and module where bits first differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError, UsageError
from lockstep.state.record.reading import RunRecords
from lockstep.state.record.steps import PARAMETERS, Entry, Key
from lockstep.tools.replay.comparison import Comparison, changed, unequal, unlike
from lockstep.tools.replay.recorded import RecordedRun
from lockstep.tools.replay.replaying import ReplayOptions, ReplayResults, replay

_WHERE = ("in A", "in B")


@dataclass(slots=True)
class Diff:
    """Result of `lockstep diff`: the differences of two runs; step and module of the first difference."""

    unlike: list[
        str
    ]  # identity, versions, environment, commit, data, settings and sources that differ
    compared: int  # number of recorded values that both runs have
    difference: str | None = None  # the first value that differs, or the runs' ends
    step: int | None = None  # the first step that differs in the replays
    parameters: list[str] = field(default_factory=list)  # those that differ before this step
    module: dict[str, Any] | None = None  # the first call in this step whose output differs
    notes: list[str] = field(default_factory=list)


def diff(directories: Sequence[Path], scratch: Path) -> Diff:
    """Compare two runs; if they differ, replay both in the directory `scratch` to find the first step.

    Raises:
        UsageError: if a directory has no run, or nothing that both have can be compared.
    """
    one, other = runs = [
        RecordedRun(path.absolute(), RunRecords.of(path).run) for path in directories
    ]
    both = one.entries.keys() & other.entries.keys()
    result = Diff(_unlike(one.content, other.content), len(both))
    key = _first(one.entries, other.entries)
    if key is not None:
        result.difference = unequal(key, one.entries[key], other.entries[key], _WHERE)
        agreed = [k.step for k in both if k.kind == PARAMETERS and k.step < key.step]
        try:
            _locate(runs, max(agreed, default=0), key.step, scratch, result)
        except LockstepError as error:
            result.notes.append(f"not replayed: {error.message}")
        return result
    ends = [{"digest": run.content.get("digest"), "steps": run.last} for run in runs]
    if not both and None in (ends[0]["digest"], ends[1]["digest"]):
        raise UsageError(
            "the two runs have no recorded values of the same steps; expected losses and hashes",
            hint="--hash-every 0 records none, and very old steps are removed",
        )
    if any(run.content.get("status") == "running" for run in runs):
        result.notes.append("a run has not ended: compared are the steps that both have recorded")
    elif ends[0] != ends[1]:
        result.difference = f"the end: {', '.join(changed(ends[0], ends[1], _WHERE))}"
    return result


def _unlike(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    own = [{"settings": {}, "sources": {}, **run.get("provenance", {})} for run in (one, other)]
    settings = changed(own[0]["settings"], own[1]["settings"], _WHERE)
    before, after = ({(Path(k).name, v) for k, v in run["sources"].items()} for run in own)
    files = sorted({name for name, _ in before ^ after})
    return [*unlike(one, other, _WHERE), *settings, *(f"{name} differs" for name in files)]


def _first(one: Mapping[Key, Entry], other: Mapping[Key, Entry], after: int = 0) -> Key | None:
    """Return the first key after step `after` at which two step records differ; `None` without one."""
    both = sorted(one.keys() & other.keys())
    return next((key for key in both if key.step > after and one[key] != other[key]), None)


def _locate(
    runs: Sequence[RecordedRun], begin: int, step: int, scratch: Path, result: Diff
) -> None:
    """Replay both runs up to `step`, and write the first step and module that differ to `result`.

    The replays begin at states of step `begin` or earlier. They hash every step, and may find a difference
    at an earlier step than the records show. Then the runs are replayed again up to that step. `scratch`:
    directory for the replays.
    """
    started = [RecordedRun.of(run.directory) for run in runs]
    placed = [run.as_recorded(scratch / f"source-{n}") for n, run in enumerate(started)]
    while True:
        asked = ReplayOptions(step=min(begin, step - 1) + 1, until=step, traces=step)
        a, b = (replay(run, asked, scratch / f"{n}-{step}") for n, run in enumerate(placed))
        found = _first(a.entries, b.entries, max(a.begin, b.begin))
        if found is None or found.step >= step:
            break
        step = found.step
    for name, run, own in zip("AB", placed, (a, b), strict=True):
        seen = Comparison(run, asked, own)
        notes = [] if seen.difference is None else [f"not as recorded: {seen.difference}"]
        result.notes += [f"the replay of {name}: {note}" for note in [*notes, *seen.notes()]]
    result.step = step
    before, after = (_traced("parameter", own) for own in (a, b))
    result.parameters = [one["name"] for one in before if one not in after]
    result.module = _first_call(a, b, step)


def _traced(of: str, own: ReplayResults) -> list[dict[str, Any]]:
    return [line for line in own.trace if line["of"] == of]


def _first_call(one: ReplayResults, other: ReplayResults, step: int) -> dict[str, Any] | None:
    """Return a description of the first module call in `step` that differs between two replays, or `None`.

    Calls differ in the module or in its output. The result has the names of the modules, the replica, and
    the first sample that differs.
    """
    for mine, its in zip(_traced("call", one), _traced("call", other), strict=False):
        if all(mine[name] == its[name] for name in ("name", "class", "replica", "output")):
            continue
        same = mine["input"] == its["input"]
        rows = [call["output" if same else "input"][1:] for call in (mine, its)]
        samples = zip(one.samples.get((step, mine["replica"]), []), *rows, strict=False)
        return {
            **{name: mine[name] for name in ("name", "class", "replica")},
            "in_b": f"{its['name']} ({its['class']})",
            "same_input": same,
            "sample": next((sample for sample, row, own in samples if row != own), None),
        }
    return None
