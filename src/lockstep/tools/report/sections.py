"""Sections of a report: identity, losses, speed, machine, events."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.state.record.reading import Event
from lockstep.tools.quantities import counted
from lockstep.tools.report import timeline
from lockstep.tools.report.charts import (
    Clock,
    curve_charts,
    machine_charts,
    share_chart,
    speed_charts,
)
from lockstep.tools.report.page import Facts, Part, Section, Table, Text
from lockstep.tools.report.runs import Shown

_MIB = 2**20
_NONE = "none: the run has not finished"


def title(runs: Sequence[Shown]) -> str:
    """Return the title of a report."""
    names = ", ".join(dict.fromkeys(str(run.identity.get("name")) for run in runs))
    return f"{names}: {runs[0].label if len(runs) == 1 else f'{len(runs)} runs'}"


def sections(runs: Sequence[Shown]) -> list[Section]:
    """Return all sections of a report on `runs`."""
    clock = Clock(runs)
    happened: list[Part] = []
    for run in runs:
        prefix = _prefix(run, runs)
        happened.append(timeline.chart(run, clock, f"{prefix}Timeline"))
        happened.append(timeline.table(run, f"{prefix}starts, failures, restarts and the end"))
    shares = [share_chart(run, _prefix(run, runs)) for run in runs]
    speed = [*speed_charts(runs, clock), *(chart for chart in shares if chart is not None)]
    machine = [chart for run in runs for chart in machine_charts(run, clock, _prefix(run, runs))]
    memory = [table for run in runs for table in _memory(run, _prefix(run, runs))]
    return [
        Section("Run" if len(runs) == 1 else "Runs", _about(runs)),
        Section("Losses and metrics", _or_text(curve_charts(runs), "The run logged no numbers.")),
        Section(
            "Speed", _or_text(speed, "No pace is recorded: no step was made, or an older version.")
        ),
        Section("Memory and utilisation", _or_text([*machine, *memory], "Nothing is recorded.")),
        Section("What happened", happened),
    ]


def _prefix(run: Shown, runs: Sequence[Shown]) -> str:
    return "" if len(runs) == 1 else f"{run.label}: "


def _or_text(parts: Sequence[Part], text: str) -> Sequence[Part]:
    return parts or [Text(text)]


# --- what the runs are ---------------------------------------------------------------------------


def _about(runs: Sequence[Shown]) -> list[Part]:
    facts = [_facts(run) for run in runs]
    if len(runs) == 1:
        return [Facts({name: value for name, value in facts[0].items() if value is not None})]
    names = dict.fromkeys(name for one in facts for name in one)
    known = [name for name in names if any(one.get(name) is not None for one in facts)]
    rows = [
        [name, *(None if one.get(name) is None else str(one[name]) for one in facts)]
        for name in known
    ]
    return [Text(_compared(facts)), Table(["", *(run.label for run in runs)], rows)]


def _facts(run: Shown) -> dict[str, object]:
    content, generations = run.recorded.run, run.generations
    newest = max(int(event.get("step", 0)) for events in run.ranks.values() for event in events)
    return {
        "status": run.status,
        "verdict": _verdict(run),
        "error": content.get("error"),
        "digest": content.get("digest", _NONE),
        "steps": content.get("steps", content.get("step", newest)),
        "seconds (last start)": content.get("seconds"),
        "layout": _layout(generations[-1]) if generations else None,
        "generations": len(generations),
        "devices": _devices(run),
        **_identity(run.identity),
        "directory": run.recorded.directory,
    }


def _verdict(run: Shown) -> str | None:
    """Return why the run failed, as the launcher saw it: the main rank's error may be a consequence."""
    failures = [event["text"] for event in run.launchers if event["kind"] == "failure"]
    return str(failures[-1]) if failures and run.status == "failed" else None


def _devices(run: Shown) -> str | None:
    """Return the names of the devices that ranks have trained on; `None` where they have none."""
    starts = (life.events[0] for found in run.lives.values() for life in found)
    names = dict.fromkeys(str(one["device_name"]) for one in starts if one.get("device_name"))
    return ", ".join(names) or None


def _layout(generation: Mapping[str, Any]) -> str:
    ranks = counted(generation.get("ranks", 1), "rank")
    nodes = counted(generation.get("nodes", 1), "node")
    return f"{ranks} on {nodes}, {generation.get('environment')}"


def _identity(identity: Mapping[str, Any]) -> dict[str, object]:
    shown: dict[str, Callable[[Any], str]] = {
        "arguments": lambda words: " ".join(map(str, words)),
        "versions": lambda found: ", ".join(f"{name} {one}" for name, one in found.items()),
    }
    return {name: shown.get(name, str)(value) for name, value in identity.items()}


#: Of these each run has its own; the rest is what makes it the same run.
_OWN = (
    "status",
    "verdict",
    "error",
    "digest",
    "steps",
    "seconds (last start)",
    "layout",
    "generations",
    "devices",
    "directory",
)


def _compared(facts: Sequence[Mapping[str, object]]) -> str:
    def differ(name: str) -> bool:
        return len({str(one.get(name)) for one in facts}) > 1

    names = dict.fromkeys(name for one in facts for name in one)
    other = [name for name in names if name not in _OWN and differ(name)]
    identity = f"The identities differ in: {', '.join(other)}." if other else "One identity."
    if any(one["digest"] == _NONE for one in facts):
        return f"{identity} Only finished runs have a digest."
    return f"{identity} {'The digests differ.' if differ('digest') else 'One digest.'}"


# --- memory of each rank -------------------------------------------------------------------------


def _memory(run: Shown, prefix: str) -> list[Table]:
    """Return a table of the memory of each rank at its end, in MiB."""
    found = {rank: _newest(events, "memory") for rank, events in run.ranks.items()}
    known = {rank: event for rank, event in found.items() if event is not None}
    names = dict.fromkeys(
        name for event in known.values() for name in event if name not in ("time", "kind")
    )
    rows = [
        [
            f"rank {rank}",
            *(event[name] / _MIB if event.get(name) is not None else None for name in names),
        ]
        for rank, event in known.items()
    ]
    heads = (name.replace("_", " ") for name in names)
    return [Table(["", *heads], rows, f"{prefix}memory at the end (MiB)")] if rows else []


def _newest(events: Sequence[Event], kind: str) -> Event | None:
    return next((event for event in reversed(events) if event["kind"] == kind), None)
