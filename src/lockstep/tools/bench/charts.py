"""Results as one HTML page with charts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.tools.bench import quantities
from lockstep.tools.bench.results import BY_WALL, Row, belongs, group
from lockstep.tools.report.page import Chart, Facts, Part, Section, Table, Text, graph_objects
from lockstep.tools.report.page import write as write_page

_PARTS = {"compute_seconds": "compute", "exchange_seconds": "exchange", "data_seconds": "data"}
_LAYOUT = {"strategy": "strategy", "exchange": "exchange", "ranks": "ranks"}
_SPEED = {
    "samples_per_second": "samples/s",
    "step_seconds": "step, s",
    "wall_seconds": "wall time, s",
    "speedup": "speed-up",
    "efficiency": "efficiency",
    "exchange_share": "share in exchange",
    "data_share": "share for data",
    "start_seconds": "start, s",
    "restart_seconds": "restart, s",
}
_PROJECTED = {
    name: _SPEED[name] for name in ("samples_per_second", "step_seconds", "speedup", "efficiency")
}
_RESIDUALS = {
    "step_seconds": "step, s",
    "predicted_step_seconds": "model, s",
    "error": "error",
    "left_out": "not fitted",
}
_COMPARED = {
    "samples_per_second_here": "samples/s",
    "samples_per_second_there": "samples/s, other",
    "wall_seconds_here": "wall time, s",
    "wall_seconds_there": "wall time, s, other",
    "ratio": "ratio",
    "speedup_here": "speed-up",
    "speedup_there": "speed-up, other",
    "efficiency_here": "efficiency",
    "efficiency_there": "efficiency, other",
}


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write the content of a file of results to `path`, as a page.

    Raises:
        OutputError: if it cannot be written.
        UsageError: if plotly is not installed.
    """
    write_page(path, f"{content['script']['name']}: how fast on which layout", sections(content))


def sections(content: Mapping[str, Any]) -> list[Section]:
    """Return what the page shows."""
    rows = [row for row in content["results"] if row.get("measured_by")]
    made = [Section("What was measured", [Facts(_facts(content)), *_failures(content["results"])])]
    if rows:
        made.append(Section("Speed", _speed(rows, content)))
        made.append(Section("Memory", [*_memory(rows)] or [Text("No memory was recorded.")]))
    if "model" in content:
        made.append(Section("Projection", _projection(content)))
    if "comparison" in content:
        made.append(Section("Beside another result", _comparison(content["comparison"])))
    return made


def _facts(content: Mapping[str, Any]) -> dict[str, object]:
    script, machine = content["script"], content["machine"]
    devices = {name for row in content["results"] for name in row.get("devices") or ()}
    return {
        "script": " ".join([script["name"], *script["arguments"]]),
        "options": " ".join(content["options"]) or "none",
        "processor": machine["processor"],
        "cores": machine["cores"],
        "devices": ", ".join(sorted(devices)) or "not known",
        "versions": ", ".join(f"{name} {number}" for name, number in machine["versions"].items()),
        "repeats": max(row["repeats"] for row in content["results"]),
        "warm-up": "the first step of each run is left out",
    }


def _failures(rows: Sequence[Row]) -> list[Part]:
    return [Text(f"Failed on {_label(row)}: {row['verdict']}") for row in rows if row["verdict"]]


def _table(names: Mapping[str, str], rows: Sequence[Row], caption: str = "") -> Table:
    """Return a table of what rows have under `names`, without columns that are empty."""
    kept = {
        name: title
        for name, title in {**_LAYOUT, **names}.items()
        if any(row.get(name) is not None for row in rows)
    }
    return Table([*kept.values()], [[row.get(name) for name in kept] for row in rows], caption)


def _groups(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows that differ in the number of ranks alone, by what they have in common."""
    found = {}
    for of in dict.fromkeys(group(row) for row in rows if row["ranks"] > 1) or [group(rows[0])]:
        members = [row for row in rows if belongs(row, of)]
        found[_name(of)] = sorted(members, key=lambda row: row["ranks"])
    return found


def _name(of: tuple[str | None, str | None]) -> str:
    return " over ".join(filter(None, of)) or "measured"


def _label(row: Row) -> str:
    named = _name(group(row))
    ranks = f"{row['ranks']} rank{'s' if row['ranks'] > 1 else ''}"
    return ranks if named == "measured" else f"{ranks}, {named}"


def _speed(rows: Sequence[Row], content: Mapping[str, Any]) -> list[Part]:
    parts: list[Part] = [_speedups(rows, content)]
    if any(row["measured_by"] == BY_WALL for row in rows):
        parts.insert(0, Text("Measured by wall time: the script makes no lockstep.Run."))
    else:
        parts.append(_steps(rows))
    return [*parts, _table(_SPEED, rows, "Medians of all repeats")]


def _speedups(rows: Sequence[Row], content: Mapping[str, Any]) -> Chart:
    """Return the chart of speed-up against ranks, with the ideal line."""
    figure = graph_objects().Figure()
    for name, members in _groups(rows).items():
        known = [row for row in members if row.get("speedup") is not None]
        ends = [_ends(row) for row in known]
        figure.add_scatter(
            x=[row["ranks"] for row in known],
            y=[row["speedup"] for row in known],
            error_y={
                "type": "data",
                "symmetric": False,
                "array": [high for _, high in ends],
                "arrayminus": [low for low, _ in ends],
            },
            name=name,
            mode="lines+markers",
        )
    comparison = content.get("comparison")
    if comparison is not None:
        _add_other(figure, comparison)
    ranks = _ranks(rows)
    base = min((row["speedup_against"] for row in rows if row.get("speedup_against")), default=1)
    figure.add_scatter(
        x=[base, ranks[-1]], y=[1, ranks[-1] / base], name="ideal", mode="lines", line_dash="dot"
    )
    shown = ranks if comparison is None else _ranks(rows, comparison["rows"])
    figure.update_xaxes(title="ranks", tickvals=shown)
    figure.update_yaxes(title=f"speed-up against {base}", rangemode="tozero")
    competing = ", ".join(map(str, sorted({row["ranks"] for row in rows if row.get("competing")})))
    note = f"More threads than cores on {competing} ranks: ranks share cores." if competing else ""
    return Chart(figure, "Speed-up against ranks", note)


def _add_other(figure: Any, comparison: Mapping[str, Any]) -> None:
    there = [row for row in comparison["rows"] if row["speedup_there"] is not None]
    for strategy in dict.fromkeys(row["strategy"] for row in there if row["ranks"] > 1):
        rows = [row for row in there if row["ranks"] == 1 or row["strategy"] == strategy]
        points = sorted({(row["ranks"], row["speedup_there"]) for row in rows})
        figure.add_scatter(
            x=[ranks for ranks, _ in points],
            y=[speedup for _, speedup in points],
            name=f"{comparison['with']}: {strategy or 'measured'}",
            mode="lines+markers",
            line_dash="dash",
        )


def _ends(row: Row) -> tuple[float, float]:
    """Return how far below and above the median the repeats reach, in units of the speed-up."""
    name = "samples_per_second" if row.get("samples_per_second") else "wall_seconds"
    low, high = (row["speedup"] * end / row[name] for end in row[f"{name}_range"])
    return row["speedup"] - low, high - row["speedup"]


def _steps(rows: Sequence[Row]) -> Chart:
    """Return the chart of a step split into compute, exchange and data."""
    figure = graph_objects().Figure()
    labels = [_label(row) for row in rows]
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
                x=[_label(row) for row in own],
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
    parts: list[Part] = [Text(f"No projection of {line}.") for line in model["refused"]]
    if content["projection"]:
        parts.append(_projected(content))
        parts.append(_table(_PROJECTED, content["projection"], "What the model says"))
        parts.append(
            _table(_RESIDUALS, model["residuals"], "How far the model is off where it was measured")
        )
        parts.append(Text(model["formula"]))
        parts += [Facts(_parameters(row)) for row in model["parameters"]]
        parts += [Text(f"Assumed: {line}.") for line in model["assumptions"]]
    return parts


def _projected(content: Mapping[str, Any]) -> Chart:
    """Return the chart of measured and projected rates."""
    figure = graph_objects().Figure()
    rows = [row for row in content["results"] if row.get("samples_per_second")]
    for name, members in _groups(rows).items():
        figure.add_scatter(
            x=[row["ranks"] for row in members],
            y=[row["samples_per_second"] for row in members],
            name=name,
            mode="markers",
        )
    for name, members in _groups(content["projection"]).items():
        figure.add_scatter(
            x=[row["ranks"] for row in members],
            y=[row["samples_per_second"] for row in members],
            name="projected" if name == "measured" else f"{name}: projected",
            mode="lines+markers",
            line_dash="dash",
            marker_symbol="circle-open",
        )
    figure.update_xaxes(title="ranks", type="log", tickvals=_ranks(rows, content["projection"]))
    figure.update_yaxes(title="samples/s", type="log")
    return Chart(figure, "Measured and projected samples per second")


def _ranks(*rows: Sequence[Row]) -> list[int]:
    return sorted({row["ranks"] for some in rows for row in some})


def _parameters(row: Row) -> dict[str, object]:
    bandwidth = row["bandwidth_bytes_per_second"]
    return {
        "of": _name(group(row)),
        "overhead": f"{quantities.seconds(row['overhead_seconds'])} a step",
        "compute": f"{quantities.seconds(row['compute_seconds_per_sample'])} a sample",
        "data": f"{quantities.seconds(row['data_seconds_per_sample'])} a sample",
        "latency": quantities.seconds(row["latency_seconds"]),
        "bandwidth": "not limited" if bandwidth is None else f"{quantities.size(bandwidth)}/s",
        "shared": f"{quantities.size(row['shared_bytes'])} a step, by exchange {row['exchange_modelled']}",
        "given": ", ".join(row["given"]) or "nothing; all is fitted",
    }


def _comparison(comparison: Mapping[str, Any]) -> list[Part]:
    table = _table(_COMPARED, comparison["rows"], f"Beside {comparison['with']}")
    return [table, *(Text(f"{line}.") for line in comparison["notes"])]
