"""Charts of logged and measured values of runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from lockstep.state.record.curves import Life
from lockstep.state.record.reading import Event
from lockstep.tools.report.page import COLOURS, Chart, graph_objects
from lockstep.tools.report.runs import Shown
from lockstep.tools.report.thin import Point, envelope, rounded, thin

#: Points of a line, and of all lines of a chart together.
_LINE, _CHART = 2000, 24000
#: Of more ranks than this a chart shows the lowest, the median and the highest.
_RANKS = 16
#: Up to so many points a line shows each of them.
_FEW = 40
_GIB = 2**30


class Clock:
    """The axis of time of a report: since each run's beginning, in a unit that fits the longest."""

    def __init__(self, runs: Sequence[Shown]) -> None:
        longest = max((run.ended - run.began for run in runs), default=0.0)
        self.unit, self._seconds = next(
            (unit, seconds)
            for unit, seconds, most in (
                ("s", 1, 600),
                ("min", 60, 36_000),
                ("h", 3600, float("inf")),
            )
            if longest <= most
        )

    def of(self, run: Shown, time: float) -> float:
        """Return when something happened, on this axis."""
        return (time - run.began) / self._seconds

    @property
    def title(self) -> str:
        """What stands below the axis."""
        return f"time since the start ({self.unit})"


def line_figure(
    lines: Sequence[tuple[str, Sequence[Point]]], x: str, y: str = "", *, from_zero: bool = True
) -> Any:
    """Return a figure with lines over one pair of axes; `None` as a value is a gap."""
    objects = graph_objects()
    most = max(4, min(_LINE, _CHART // max(len(lines), 1)))
    traces = [
        _line(objects, name, thin(points, most), COLOURS[k % len(COLOURS)])
        for k, (name, points) in enumerate(lines)
    ]
    layout = {"hovermode": "x unified" if len(lines) <= len(COLOURS) else "closest"}
    kind = "tozero" if from_zero else "normal"
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}, "rangemode": kind}}
    return objects.Figure(traces, layout | axes | {"showlegend": len(lines) > 1})


def _line(objects: Any, name: str, points: Sequence[Point], colour: str) -> Any:
    return objects.Scatter(
        x=[rounded(x) for x, _ in points],
        y=[rounded(y) for _, y in points],
        name=name,
        mode="lines+markers" if len(points) <= _FEW else "lines",
        line={"color": colour, "width": 1.6},
        marker={"size": 5},
    )


def curve_charts(runs: Sequence[Shown]) -> list[Chart]:
    """Return a chart for each logged number, with a line for each run that logged it."""
    names = dict.fromkeys(name for run in runs for name in run.curves)
    return [
        Chart(
            line_figure(
                [(run.label, list(run.curves[name].items())) for run in runs if name in run.curves],
                "step",
                from_zero=False,
            ),
            name,
            log=True,
        )
        for name in names
    ]


def speed_charts(runs: Sequence[Shown], clock: Clock) -> list[Chart]:
    """Return charts of samples per second and of a step's time, as the lowest rank measured them."""
    rates = [(run.label, _paced(run, clock, _rate)) for run in runs]
    steps = [(run.label, _paced(run, clock, lambda pace: pace["median"] * 1000)) for run in runs]
    charts = [
        (rates, "samples/s", "Samples per second", "of all ranks together"),
        (steps, "ms", "Time of a step", "the median of each second"),
    ]
    return [
        Chart(line_figure(lines, clock.title, unit), title, note)
        for lines, unit, title, note in charts
        if any(points for _, points in lines)
    ]


def _rate(pace: Event) -> float | None:
    return pace["samples"] / pace["seconds"] if pace["seconds"] else None


def _paced(run: Shown, clock: Clock, value: Callable[[Event], float | None]) -> list[Point]:
    return list(_points(run, clock, min(run.ranks), "pace", value))


def _points(
    run: Shown,
    clock: Clock,
    rank: int,
    kind: str,
    value: Callable[[Event], float | None],
) -> Iterator[Point]:
    """Yield a value over time, with a gap between two generations."""
    for number, life in enumerate(run.lives[rank]):
        if number:
            yield clock.of(run, life.time), None
        for event in _measured(life.events, kind):
            yield clock.of(run, event["time"]), value(event)


def _measured(events: Sequence[Event], kind: str) -> list[Event]:
    """Return the measurements of one kind; of the pace without the first, which is that of a warm-up."""
    found = [event for event in events if event["kind"] == kind]
    return found[1:] if kind == "pace" else found


def machine_charts(run: Shown, clock: Clock, prefix: str) -> list[Chart]:
    """Return charts of memory and utilisation, with a line for each rank."""
    measures: list[tuple[str, str, float]] = [
        ("host", "Memory of the host (GiB)", _GIB),
        ("device", "Memory of the device (GiB)", _GIB),
        ("cpu", "Processor cores in use", 1),
        ("busy", "Utilisation of the device (%)", 0.01),
    ]
    charts = []
    for key, title, unit in measures:
        lines = [
            (f"rank {rank}", list(_points(run, clock, rank, "machine", _in(key, unit))))
            for rank in run.ranks
        ]
        if not any(value is not None for _, points in lines for _, value in points):
            continue
        note = ""
        if len(lines) > _RANKS:
            note = f"of {len(lines)} ranks"
            lines = list(envelope([points for _, points in lines]).items())
        charts.append(Chart(line_figure(lines, clock.title), f"{prefix}{title}", note))
    return charts


def _in(key: str, unit: float) -> Callable[[Event], float | None]:
    def value(event: Event) -> float | None:
        measured = event.get(key)
        return None if measured is None else measured / unit

    return value


def share_chart(run: Shown, prefix: str) -> Chart | None:
    """Return a chart of what the time of each rank went to; `None` where no pace is recorded."""
    objects = graph_objects()
    spent = {rank: _spent(found) for rank, found in run.lives.items()}
    known = {rank: parts for rank, parts in spent.items() if sum(parts.values()) > 0}
    if not known:
        return None
    names = [f"rank {rank}" for rank in known]
    bars = [
        objects.Bar(
            y=names,
            x=[
                rounded(100 * parts.get(part, 0.0) / sum(parts.values()))
                for parts in known.values()
            ],
            name=part,
            orientation="h",
            marker={"color": COLOURS[k]},
        )
        for k, part in enumerate(dict.fromkeys(part for parts in known.values() for part in parts))
    ]
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "% of the time of all steps"}, "range": [0, 100]},
        "yaxis": {"autorange": "reversed", "type": "category"},
    }
    return Chart(
        objects.Figure(bars, layout),
        f"{prefix}Time of steps",
        height=max(200, 110 + 24 * len(names)),
    )


def _spent(found: Sequence[Life]) -> dict[str, float]:
    """Return the seconds of a rank's steps by what they went to."""
    paces = [pace for life in found for pace in _measured(life.events, "pace")]
    data = sum(pace["data"] for pace in paces)
    exchange = sum(pace.get("exchange") or 0.0 for pace in paces)
    hidden = any(pace.get("exchange") is None for pace in paces)
    rest = sum(pace["seconds"] for pace in paces) - data - exchange
    parts = {"compute and exchange" if hidden else "compute": max(rest, 0.0)}
    return parts | ({} if hidden else {"exchange": exchange}) | {"data": data}
