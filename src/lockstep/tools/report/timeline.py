"""Show the events of a run over time, as a chart and as a table: starts, failures, checkpoints, end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lockstep.state.record.reading import describe
from lockstep.tools.report.charts import Clock
from lockstep.tools.report.page import Chart, Table, graph_objects
from lockstep.tools.report.runs import ReportedRun

#: Largest numbers of rows of a chart and of lines of a table; a note counts the rest.
_ROWS, _LINES = 64, 200
_LAUNCHER = "launcher"
#: Symbol, size and colour of each kind of entry.
_MARKS = {
    "start": ("triangle-right", 11, "#12a150"),
    "checkpoint": ("diamond", 8, "#3b82f6"),
    "audit": ("cross", 11, "#a21caf"),
    "failure": ("x", 11, "#e5484d"),
    "restart": ("star", 12, "#e8710a"),
    "end": ("square", 10, "#80858f"),
}
_RANK = re.compile(r"rank (\d+)")


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """An event in the timeline of a run: its time, its kind, its row in the chart, and its text."""

    time: float  # Unix seconds
    kind: str
    row: str  # a rank, or the launcher
    text: str


def timeline_entries(run: ReportedRun) -> list[TimelineEntry]:
    """Return the events of a run for its timeline, sorted by time: starts, failures, checkpoints etc."""
    found = [one for rank in run.ranks for one in _of_rank(run, rank)]
    for event in run.launchers:
        if text := describe(event):
            named = event["kind"] == "failure" and _RANK.search(event.get("name") or text)
            row = named[0] if named else _LAUNCHER
            found.append(TimelineEntry(event["time"], event["kind"], row, text))
    return sorted(found, key=lambda one: one.time)


def _of_rank(run: ReportedRun, rank: int) -> Iterator[TimelineEntry]:
    row = f"rank {rank}"
    for generation in run.by_generation[rank]:
        known = {name: event[name] for event in generation.events[:2] for name in event}
        where = f" on {known['host']}" if "host" in known else ""
        source = f" ({known['source'].rpartition('/')[2]})" if "source" in known else ""
        after = f", resumed after step {generation.step}{source}" if generation.step else ""
        yield TimelineEntry(generation.time, "start", row, f"{row} starts{where}{after}")
    for event in run.ranks[rank]:
        if text := describe(event):
            yield TimelineEntry(event["time"], event["kind"], row, text)


def chart(run: ReportedRun, clock: Clock, title: str) -> Chart:
    """Return a chart of the timeline: a row for each rank, with a bar for each period that it ran.

    Events are marks in the rows. Events of launchers are in a row of their own.
    """
    objects = graph_objects()
    rows = [f"rank {rank}" for rank in run.ranks][:_ROWS]
    found = timeline_entries(run)
    rows += [_LAUNCHER] * any(one.row == _LAUNCHER for one in found)
    found = [one for one in found if one.row in rows]
    traces = [_bars(objects, run, clock, rows)]
    of_kinds = [[one for one in found if one.kind == kind] for kind in _MARKS]
    traces += [_marks(objects, run, clock, of_kind) for of_kind in of_kinds if of_kind]
    layout = {
        "xaxis": {"title": {"text": clock.title}},
        "yaxis": {
            "type": "category",
            "categoryorder": "array",
            "categoryarray": rows[::-1],
            "range": [-0.6, len(rows) - 0.4],
        },
        "hovermode": "closest",
    }
    more = len(run.ranks) - _ROWS
    note = f"The first {_ROWS} ranks; {more} more are not drawn." if more > 0 else ""
    return Chart(
        objects.Figure(traces, layout),
        title,
        note,
        height=130 + 26 * len(rows),
        wide=True,
    )


def _bars(objects: Any, run: ReportedRun, clock: Clock, rows: Sequence[str]) -> Any:
    x: list[float | None] = []
    y: list[str | None] = []
    for rank, found in run.by_generation.items():
        for generation in found if f"rank {rank}" in rows else ():
            ends = (generation.time, generation.events[-1]["time"])
            x += [*(clock.of(run, end) for end in ends), None]
            y += [f"rank {rank}", f"rank {rank}", None]
    line = {"width": 9, "color": "rgba(59,130,246,0.35)"}
    return objects.Scatter(x=x, y=y, mode="lines", line=line, name="runs", hoverinfo="skip")


def _marks(objects: Any, run: ReportedRun, clock: Clock, found: Sequence[TimelineEntry]) -> Any:
    """Return a trace with a mark for each of `found`, which are of one kind."""
    kind = found[0].kind
    symbol, size, colour = _MARKS[kind]
    return objects.Scatter(
        x=[clock.of(run, one.time) for one in found],
        y=[one.row for one in found],
        text=[one.text for one in found],
        mode="markers",
        marker={"symbol": symbol, "size": size, "color": colour},
        name=kind,
        hoverinfo="text",
    )


def table(run: ReportedRun, caption: str) -> Table:
    """Return the timeline as a table of times and events, without checkpoints.

    Only the first events are listed if there are many; a last row has the number of the others.
    """
    found = [one for one in timeline_entries(run) if one.kind != "checkpoint"]
    rows = [[f"{one.time - run.began:.1f}", one.text] for one in found[:_LINES]]
    if len(found) > _LINES:
        rows.append(["", f"… {len(found) - _LINES} more"])
    return Table(["s", "what happened"], rows, caption)
