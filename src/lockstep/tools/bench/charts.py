"""Show the results of a benchmark as an HTML page with charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.tools.bench import table
from lockstep.tools.bench.results import BY_WALL, Row, belongs, devices, group, label
from lockstep.tools.report.page import (
    Chart,
    Paragraph,
    Part,
    Section,
    Table,
    ValueList,
    graph_objects,
)
from lockstep.tools.report.page import write as write_page

_PARTS = {"compute_seconds": "compute", "exchange_seconds": "exchange", "data_seconds": "data"}


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write an HTML page on `content`, the content of a results file, to `path`.

    Raises:
        OutputError: if the file cannot be written.
        UsageError: if plotly is not installed.
    """
    write_page(path, f"{content['script']['name']}: how fast on which layout", sections(content))


def sections(content: Mapping[str, Any]) -> list[Section]:
    """Return the sections of an HTML page on `content`, the content of a results file."""
    rows = [row for row in content["results"] if row.get("measured_by")]
    comparison = content.get("comparison")
    failed = map(Paragraph, table.failures(content["results"]))
    made = [Section("What was measured", [_facts(content), *failed])]
    if rows:
        by_wall = any(row["measured_by"] == BY_WALL for row in rows)
        columns = table.BY_WALL_TIME if by_wall else table.SPEED
        speed: list[Part] = [_speedups(rows, comparison)]
        speed += [] if by_wall else [_steps(rows)]
        speed.append(_table([*columns, *table.TIMES], rows, "Medians of all repeats"))
        made.append(Section("Speed", [*speed, *map(Paragraph, table.notes(rows))]))
        made.append(Section("Memory", [*_memory(rows)] or [Paragraph("No memory was recorded.")]))
    if "model" in content:
        made.append(Section("Projection", _projection(content)))
    if comparison is not None:
        beside = f"Beside {comparison['with']}"
        pair = [_table(one, comparison["rows"], beside) for one in (table.COMPARED, table.GAINS)]
        made.append(Section("Beside another result", [*pair, *map(Paragraph, comparison["notes"])]))
    return made


def _facts(content: Mapping[str, Any]) -> ValueList:
    script, machine = content["script"], content["machine"]
    return ValueList(
        {
            "script": " ".join([script["name"], *script["arguments"]]),
            "options": " ".join(content["options"]) or "none",
            "processor": machine["processor"],
            "cores": machine["cores"],
            "devices": devices(content["results"]),
            "versions": ", ".join(f"{name} {one}" for name, one in machine["versions"].items()),
            "repeats": max(row["repeats"] for row in content["results"]),
            "warm-up": "the first step of each run is left out",
        }
    )


def _table(columns: Sequence[table.Column], rows: Sequence[Row], caption: str) -> Table:
    return Table(*table.cells(columns, rows), caption)


def _lines(rows: Sequence[Row], value: str) -> dict[str, list[Row]]:
    """Return the lines of a chart: by title, the rows of one strategy and exchange, sorted by ranks.

    Rows without the field `value` are left out. A row of one rank may belong to several lines.
    """
    known = sorted((row for row in rows if row.get(value)), key=lambda row: row["ranks"])
    groups = dict.fromkeys(group(row) for row in known if row["ranks"] > 1)
    return {
        " over ".join(filter(None, of)) or "measured": [row for row in known if belongs(row, of)]
        for of in groups or dict.fromkeys(map(group, known))
    }


def _add(figure: Any, name: str, rows: Sequence[Row], value: str, **style: Any) -> None:
    """Add a line called `name` to a plotly figure: the field `value` of `rows` over the number of ranks.

    `style` holds further arguments of `figure.add_scatter`.
    """
    points = {"x": [row["ranks"] for row in rows], "y": [row[value] for row in rows]}
    figure.add_scatter(**points, name=name, **{"mode": "lines+markers", **style})


def _speedups(rows: Sequence[Row], comparison: Mapping[str, Any] | None) -> Chart:
    """Return the chart of speed-up over ranks, with error bars from the repeats and the ideal line.

    Dashed lines show the other results of `comparison`, if that is not `None`.
    """
    figure = graph_objects().Figure()
    for name, members in _lines(rows, "speedup").items():
        ends = [_ends(row) for row in members]
        bars = {"array": [high for _, high in ends], "arrayminus": [low for low, _ in ends]}
        _add(figure, name, members, "speedup", error_y={"type": "data", "symmetric": False, **bars})
    there = [] if comparison is None else comparison["rows"]
    for name, members in _lines(there, "speedup_there").items():
        title = f"{comparison and comparison['with']}: {name}"
        _add(figure, title, members, "speedup_there", line_dash="dash")
    most = max(row["ranks"] for row in rows)
    base = min((row["speedup_against"] for row in rows if row.get("speedup_against")), default=1)
    ideal = [{"ranks": ranks, "speedup": ranks / base} for ranks in (base, most)]
    _add(figure, "ideal", ideal, "speedup", mode="lines", line_dash="dot")
    figure.update_xaxes(title="ranks", tickvals=_ranks(rows, there))
    figure.update_yaxes(title=f"speed-up against {base}", rangemode="tozero")
    return Chart(figure, "Speed-up against ranks")


def _ends(row: Row) -> tuple[float, float]:
    """Return the lengths of a row's error bar, below and above its speed-up.

    The bar spans the speed-ups of the slowest and the fastest launch.
    """
    speedup = row["speedup"]
    if row.get("samples_per_second"):
        ends = [
            speedup * end / row["samples_per_second"] for end in row["samples_per_second_range"]
        ]
    else:  # the shortest launch has the highest speed-up
        ends = [speedup * row["wall_seconds"] / end for end in row["wall_seconds_range"]]
    return speedup - min(ends), max(ends) - speedup


def _steps(rows: Sequence[Row]) -> Chart:
    """Return a bar chart of each row's step time: computing, exchange and waiting for data, stacked."""
    figure = graph_objects().Figure()
    labels = [label(row) for row in rows]
    for name, title in _PARTS.items():
        values = [1000 * (row.get(name) or 0.0) for row in rows]
        figure.add_bar(x=labels, y=values, name=title)
    figure.update_layout(barmode="stack")
    figure.update_yaxes(title="ms")
    unknown = any(row.get("exchange_seconds") is None for row in rows if row["ranks"] > 1)
    note = "Of the rank that waits least in the exchange: the others wait for that one."
    apart = " On this device the exchange is part of compute." if unknown else ""
    return Chart(figure, "Where the time of a step goes", note + apart)


def _memory(rows: Sequence[Row]) -> list[Chart]:
    made = []
    for kind, title in (("host", "Memory of each process"), ("device", "Memory on each GPU")):
        known = [row for row in rows if row.get(f"{kind}_bytes")]
        if not known:
            continue
        figure = graph_objects().Figure()
        for rank in range(max(row["ranks"] for row in known)):
            own = [row for row in known if rank < len(row[f"{kind}_bytes"])]
            figure.add_bar(
                x=[label(row) for row in own],
                y=[row[f"{kind}_bytes"][rank] / 1e6 for row in own],
                name=f"rank {rank}",
            )
        figure.update_layout(barmode="group")
        figure.update_yaxes(title="MB")
        shared = "The largest resident size, all of torch in it." if kind == "host" else ""
        made.append(Chart(figure, title, shared))
    return made


def _projection(content: Mapping[str, Any]) -> list[Part]:
    model = content["model"]
    parts: list[Part] = [Paragraph(f"No projection of {line}.") for line in model["refused"]]
    if content["projection"]:
        off = "How far the model is off where it was measured"
        parts.append(_projected(content["results"], content["projection"]))
        parts.append(_table(table.PROJECTED, content["projection"], "What the model says"))
        parts.append(_table(table.RESIDUALS, model["residuals"], off))
        parts += [
            Paragraph(model["formula"]),
            *map(Paragraph, map(table.parameters, model["parameters"])),
        ]
        parts += [Paragraph(f"Assumed: {line}.") for line in model["assumptions"]]
    return parts


def _projected(measured: Sequence[Row], projected: Sequence[Row]) -> Chart:
    """Return the chart of measured and projected samples per second over the number of ranks."""
    figure = graph_objects().Figure()
    rate, dashed = "samples_per_second", {"line_dash": "dash", "marker_symbol": "circle-open"}
    for name, members in _lines(measured, rate).items():
        _add(figure, name, members, rate, mode="markers")
    for name, members in _lines(projected, rate).items():
        _add(figure, f"{name}: projected", members, rate, **dashed)
    figure.update_xaxes(title="ranks", type="log", tickvals=_ranks(measured, projected))
    figure.update_yaxes(title="samples/s", type="log")
    return Chart(figure, "Measured and projected samples per second")


def _ranks(*rows: Sequence[Row]) -> list[int]:
    return sorted({row["ranks"] for some in rows for row in some})
