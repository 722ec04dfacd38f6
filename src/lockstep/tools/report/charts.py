"""Charts of logged values, speed and memory of runs."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from lockstep.state.record.curves import Generation
from lockstep.state.record.reading import Event
from lockstep.tools.quantities import rounded
from lockstep.tools.report.page import COLOURS, Chart, graph_objects
from lockstep.tools.report.runs import ReportedRun

#: A point: its position, and its value; `None` is a gap.
Point = tuple[float, float | None]
#: Largest number of points of a line, and of all lines of a chart together.
_LINE, _CHART = 2000, 24000
#: Number of ranks above which a chart shows only the lowest, the median and the highest value.
_RANKS = 16
#: Number of points up to which a line marks each point.
_FEW = 40
_GIB = 2**30


class Clock:
    """The time axis of a report: time since each run's start, in a unit that suits the longest run."""

    def __init__(self, runs: Sequence[ReportedRun]) -> None:
        longest = max((run.ended - run.began for run in runs), default=0.0)
        units = (("s", 1, 600), ("min", 60, 36_000), ("h", 3600, float("inf")))
        self.unit, self._seconds = next(
            (unit, seconds) for unit, seconds, most in units if longest <= most
        )

    def of(self, run: ReportedRun, time: float) -> float:
        """Return the position on this axis of the Unix time `time` in `run`."""
        return (time - run.began) / self._seconds

    @property
    def title(self) -> str:
        """Title of the time axis, with its unit."""
        return f"time since the start ({self.unit})"


def line_figure(
    lines: Sequence[tuple[str, Sequence[Point]]], x: str, y: str = "", *, from_zero: bool = True
) -> Any:
    """Return a plotly figure with a line for each (name, points) of `lines`.

    `x` and `y` are the titles of the axes. A point whose y is `None` is a gap in the line. `from_zero`:
    whether the y axis begins at 0.
    """
    objects = graph_objects()
    most = max(4, min(_LINE, _CHART // max(len(lines), 1)))
    traces = []
    for (name, points), colour in zip(lines, cycle(COLOURS), strict=False):
        shown = thin(points, most)
        trace = objects.Scatter(
            x=[rounded(x) for x, _ in shown],
            y=[rounded(y) for _, y in shown],
            name=name,
            mode="lines+markers" if len(shown) <= _FEW else "lines",
            line={"color": colour, "width": 1.6},
            marker={"size": 5},
        )
        traces.append(trace)
    layout = {"hovermode": "x unified" if len(lines) <= len(COLOURS) else "closest"}
    kind = "tozero" if from_zero else "normal"
    axes = {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}, "rangemode": kind}}
    return objects.Figure(traces, layout | axes | {"showlegend": len(lines) > 1})


def curve_charts(runs: Sequence[ReportedRun]) -> list[Chart]:
    """Return a chart over steps for each number that scripts logged, with a line for each run."""
    charts = []
    for name in dict.fromkeys(name for run in runs for name in run.curves):
        lines = [(run.label, [*run.curves[name].items()]) for run in runs if name in run.curves]
        charts.append(Chart(line_figure(lines, "step", from_zero=False), name, log=True))
    return charts


def speed_charts(runs: Sequence[ReportedRun], clock: Clock) -> list[Chart]:
    """Return a chart of samples per second and one of step times, over time, a line for each run.

    The values are measured by the lowest rank that has recorded events.
    """

    def rate(pace: Event) -> float | None:
        return pace["samples"] / pace["seconds"] if pace["seconds"] else None

    def step(pace: Event) -> float:
        return float(pace["median"] * 1000)

    charts = []
    for value, unit, title, note in (
        (rate, "samples/s", "Samples per second", "of all ranks together"),
        (step, "ms", "Time of a step", "the median of each second"),
    ):
        lines = [(run.label, _points(run, clock, min(run.ranks), "pace", value)) for run in runs]
        if any(points for _, points in lines):
            charts.append(Chart(line_figure(lines, clock.title, unit), title, note))
    return charts


def _points(
    run: ReportedRun, clock: Clock, rank: int, kind: str, value: Callable[[Event], float | None]
) -> list[Point]:
    """Return (time, value) points of one line of a chart, with a gap at each restart of the rank.

    The points are the events of `rank` with the kind `kind`. `value` computes the value of an event.
    """
    points: list[Point] = []
    for generation in run.by_generation[rank]:
        points += [(clock.of(run, generation.time), None)] if points else []
        points += [
            (clock.of(run, event["time"]), value(event)) for event in _measured(generation, kind)
        ]
    return points


def _measured(generation: Generation, kind: str) -> list[Event]:
    """Return the events with the kind `kind` in a generation.

    Of the events with step times (`pace`), the first one is left out: it contains the warm-up.
    """
    found = [event for event in generation.events if event["kind"] == kind]
    return found[1:] if kind == "pace" else found


def machine_charts(run: ReportedRun, clock: Clock, prefix: str) -> list[Chart]:
    """Return charts of memory and utilisation over time, with one line for each rank.

    With many ranks, the lines are the highest, median and lowest values instead. `prefix` begins the titles
    of the charts.
    """
    measures: list[tuple[str, str, float]] = [
        ("host", "Memory of the host (GiB)", _GIB),
        ("device", "Memory of the device (GiB)", _GIB),
        ("cpu", "Processor cores in use", 1),
        ("busy", "Utilisation of the device (%)", 0.01),
    ]
    charts = []
    for key, title, unit in measures:

        def value(event: Event, key: str = key, unit: float = unit) -> float | None:
            return None if event.get(key) is None else event[key] / unit

        lines = [(f"rank {one}", _points(run, clock, one, "machine", value)) for one in run.ranks]
        if not any(value is not None for _, points in lines for _, value in points):
            continue
        note = ""
        if len(lines) > _RANKS:
            note = f"of {len(lines)} ranks"
            lines = list(envelope([points for _, points in lines]).items())
        charts.append(Chart(line_figure(lines, clock.title), f"{prefix}{title}", note))
    return charts


def share_chart(run: ReportedRun, prefix: str) -> Chart | None:
    """Return a chart of how each rank's step time divides into its parts.

    The parts are computing, exchanging gradients and waiting for data. `prefix` begins the chart's title.
    Return `None` if no step times are recorded.
    """
    spent = {rank: _spent(found) for rank, found in run.by_generation.items()}
    known = {rank: parts for rank, parts in spent.items() if sum(parts.values()) > 0}
    if not known:
        return None
    names = [f"rank {rank}" for rank in known]
    figure = graph_objects().Figure()
    for k, part in enumerate(dict.fromkeys(part for parts in known.values() for part in parts)):
        shares = [parts.get(part, 0.0) / sum(parts.values()) for parts in known.values()]
        x, marker = [rounded(100 * share) for share in shares], {"color": COLOURS[k]}
        figure.add_bar(y=names, x=x, name=part, orientation="h", marker=marker)
    layout = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "% of the time of all steps"}, "range": [0, 100]},
        "yaxis": {"autorange": "reversed", "type": "category"},
    }
    figure.update_layout(layout)
    return Chart(figure, f"{prefix}Time of steps", height=max(200, 110 + 24 * len(names)))


def _spent(found: Sequence[Generation]) -> dict[str, float]:
    """Return the seconds that a rank has spent on computing, the exchange and waiting for data.

    `found` are the events of the rank by generation. If the exchange is not measured separately, its time
    is in that of computing.
    """
    paces = [pace for generation in found for pace in _measured(generation, "pace")]
    data = sum(pace["data"] for pace in paces)
    exchange = sum(pace.get("exchange") or 0.0 for pace in paces)
    hidden = any(pace.get("exchange") is None for pace in paces)
    rest = sum(pace["seconds"] for pace in paces) - data - exchange
    parts = {"compute and exchange" if hidden else "compute": max(rest, 0.0)}
    return parts | ({} if hidden else {"exchange": exchange}) | {"data": data}


def thin(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` of `points`, in order, with the first, last, lowest and highest among them.

    A value may be `None` or NaN, which is a gap; `most` is at least 4.
    """
    assert most >= 4, "a stretch has a lowest and a highest point, a curve a first and a last one"
    if len(points) <= most:
        return list(points)
    values = np.array([math.nan if y is None else y for _, y in points])
    chosen = {0, len(points) - 1}
    for part in np.array_split(np.arange(1, len(points) - 1), (most - 2) // 2):
        known = part[~np.isnan(values[part])]
        ends = (
            (known[values[known].argmin()], known[values[known].argmax()])
            if known.size
            else part[:1]
        )
        chosen.update(map(int, ends))
    return [points[k] for k in sorted(chosen)]


def envelope(lines: Sequence[Sequence[Point]], most: int = 300) -> dict[str, list[Point]]:
    """Return three lines, `highest`, `median` and `lowest`, over the values of many lines.

    The range of x is divided into at most `most` intervals; each gives one point per line.
    """
    known = [(x, y) for points in lines for x, y in points if y is not None and not math.isnan(y)]
    first, last = min(x for x, _ in known), max(x for x, _ in known)
    width = (last - first) / most or 1.0
    stretches: defaultdict[int, list[float]] = defaultdict(list)
    for x, y in known:
        stretches[min(int((x - first) / width), most - 1)].append(y)
    return {
        name: [(first + (k + 0.5) * width, of(stretches[k])) for k in sorted(stretches)]
        for name, of in (("highest", max), ("median", statistics.median), ("lowest", min))
    }
