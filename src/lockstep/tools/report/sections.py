"""Make the sections of a report: identity, losses, speed, memory, events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.tools.quantities import counted
from lockstep.tools.report import timeline
from lockstep.tools.report.charts import (
    Clock,
    curve_charts,
    machine_charts,
    share_chart,
    speed_charts,
)
from lockstep.tools.report.page import Paragraph, Part, Section, Table, ValueList
from lockstep.tools.report.runs import ReportedRun

_MIB = 2**20
_NONE = "none: the run has not finished"


def title(runs: Sequence[ReportedRun]) -> str:
    """Return the title of a report on `runs`."""
    names = ", ".join(dict.fromkeys(str(run.identity.get("name")) for run in runs))
    return f"{names}: {runs[0].label if len(runs) == 1 else f'{len(runs)} runs'}"


def sections(runs: Sequence[ReportedRun]) -> list[Section]:
    """Return all sections of a report on `runs`."""
    clock = Clock(runs)
    happened: list[Part] = []
    speed: list[Part] = [*speed_charts(runs, clock)]
    machine: list[Part] = []
    memory: list[Part] = []
    audits: list[Part] = []
    for run in runs:
        prefix = "" if len(runs) == 1 else f"{run.label}: "
        happened.append(timeline.chart(run, clock, f"{prefix}Timeline"))
        happened.append(timeline.table(run, f"{prefix}starts, failures, restarts and the end"))
        speed += filter(None, [share_chart(run, prefix)])
        machine += machine_charts(run, clock, prefix)
        memory += _memory(run, prefix)
        audits += _audits(run, prefix)
    return [
        Section("Run" if len(runs) == 1 else "Runs", [*_about(runs), *audits]),
        Section("Losses and metrics", _or_text(curve_charts(runs), "The run logged no numbers.")),
        Section(
            "Speed", _or_text(speed, "No pace is recorded: no step was made, or an older version.")
        ),
        Section("Memory and utilisation", _or_text([*machine, *memory], "Nothing is recorded.")),
        Section("What happened", happened),
    ]


def _or_text(parts: Sequence[Part], text: str) -> Sequence[Part]:
    return parts or [Paragraph(text)]


# --- identity of the runs -----------------------------------------------------------------------


def _about(runs: Sequence[ReportedRun]) -> list[Part]:
    facts = [_facts(run) for run in runs]
    if len(runs) == 1:
        return [ValueList({name: value for name, value in facts[0].items() if value is not None})]
    rows = []
    for name in dict.fromkeys(name for one in facts for name in one):
        values = [None if one.get(name) is None else str(one[name]) for one in facts]
        rows += [[name, *values]] if any(value is not None for value in values) else []
    return [
        Paragraph(_compared(facts, [run.identity for run in runs])),
        Table(["", *(run.label for run in runs)], rows),
    ]


def _facts(run: ReportedRun) -> dict[str, object]:
    identity = run.identity
    versions = (f"{name} {one}" for name, one in identity.get("versions", {}).items())
    return {
        **_own(run),
        **{name: str(value) for name, value in identity.items()},
        "arguments": " ".join(map(str, identity.get("arguments", ()))),
        "versions": ", ".join(versions),
        "directory": run.recorded.directory,
    }


def _own(run: ReportedRun) -> dict[str, object]:
    """Return facts on a run by name: its status, digest, steps, layout, devices and others."""
    content = run.recorded.run
    generations = content.get("generations", [])
    newest = max(int(event.get("step", 0)) for events in run.ranks.values() for event in events)
    # The main rank's error may be a consequence of a failure that the launcher has recorded.
    failures = [event["text"] for event in run.launchers if event["kind"] == "failure"]
    layout = parent = audited = None
    if "parent" in content:
        parent = f"{content['parent'].get('directory')}, step {content['parent'].get('step')}"
    if count := content.get("audits", {}).get("count"):
        audited = f"{count} without a difference, up to step {content['audits'].get('confirmed')}"
    if generations:
        ranks = counted(generations[-1].get("ranks", 1), "rank")
        nodes = counted(generations[-1].get("nodes", 1), "node")
        layout = f"{ranks} on {nodes}, {generations[-1].get('environment')}"
    return {
        "status": run.status,
        "parent": parent,
        "verdict": failures[-1] if failures and run.status == "failed" else None,
        "error": content.get("error"),
        "digest": content.get("digest", _NONE),
        "steps": content.get("steps", content.get("step", newest)),
        "seconds (last start)": content.get("seconds"),
        "layout": layout,
        "generations": len(generations),
        "devices": _devices(run),
        "audits": audited,
    }


def _audits(run: ReportedRun, prefix: str) -> list[Table]:
    """Return a table of the audits that found a difference, or an empty list if there are none.

    Each row names the rank that computed wrong bits. `prefix` begins the caption.
    """
    names = ("step", "rank", "host", "device", "confirmed")
    found = run.recorded.run.get("audits", {}).get("found", [])
    rows = [[one.get(name) for name in names] for one in found]
    heads = (*names[:-1], "confirmed up to step")
    return [Table(heads, rows, f"{prefix}audits that found a difference")] if rows else []


def _devices(run: ReportedRun) -> str | None:
    """Return the names of the devices on which ranks have trained, as text; `None` without any."""
    starts = (generation.events[0] for found in run.by_generation.values() for generation in found)
    names = dict.fromkeys(str(one["device_name"]) for one in starts if one.get("device_name"))
    return ", ".join(names) or None


def _compared(
    facts: Sequence[Mapping[str, object]], identities: Sequence[Mapping[str, Any]]
) -> str:
    def differ(name: str, values: Sequence[Mapping[str, object]]) -> bool:
        return len({str(one.get(name)) for one in values}) > 1

    names = dict.fromkeys(name for one in identities for name in one)
    other = [name for name in names if differ(name, identities)]
    identity = f"The identities differ in: {', '.join(other)}." if other else "One identity."
    if any(one["digest"] == _NONE for one in facts):
        return f"{identity} Only finished runs have a digest."
    return f"{identity} {'The digests differ.' if differ('digest', facts) else 'One digest.'}"


# --- memory of each rank -------------------------------------------------------------------------


def _memory(run: ReportedRun, prefix: str) -> list[Table]:
    """Return a table of each rank's memory at its end in MiB, or an empty list if none is recorded.

    `prefix` begins the caption.
    """
    known = {  # the last one of each rank
        rank: event
        for rank, events in run.ranks.items()
        for event in events
        if event["kind"] == "memory"
    }
    names = [*dict.fromkeys(name for event in known.values() for name in event)]
    names = [name for name in names if name not in ("time", "kind")]
    rows: list[list[object]] = []
    for rank, event in known.items():
        values = (event.get(name) for name in names)
        rows.append(
            [f"rank {rank}", *(None if value is None else value / _MIB for value in values)]
        )
    heads = (name.replace("_", " ") for name in names)
    return [Table(["", *heads], rows, f"{prefix}memory at the end (MiB)")] if rows else []
