"""Show the results of a benchmark as tables and lines of text on a terminal.

The HTML page of `charts.py` has tables with the same columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lockstep.tools.bench.results import BY_WALL, Row, label
from lockstep.tools.quantities import seconds, size, three

#: A column: its title, the name of its value in a row, and the function that formats the value.
Column = tuple[str, str, Callable[[Any], str]]

_percent, _hundredths = "{:.1%}".format, "{:.2f}".format
#: Cores in use per second of computing below which ranks count as hindered by other programs.
_UNHINDERED = 0.8


def show(content: Mapping[str, Any], console: Console) -> None:
    """Print tables and notes on the content of a results file."""
    rows = content["results"]
    measured = [row for row in rows if row.get("measured_by")]
    if measured:
        by_wall = all(row["measured_by"] == BY_WALL for row in measured)
        _print(console, BY_WALL_TIME if by_wall else SPEED, rows)
        _print(console, TIMES, measured)
        _print(console, _MACHINE, measured)
    _print_lines(console, *notes(measured), *failures(rows))
    if "model" in content:
        model = content["model"]
        if content["projection"]:
            _print_lines(console, "", f"projection: {model['formula']}")
            _print(console, PROJECTED, content["projection"])
            _print(console, _PROJECTED_TIMES, content["projection"])
            _print(
                console,
                BESIDE,
                [row for row in content["projection"] if "ring_step_seconds" in row],
            )
        _print_lines(console, *map(parameters, model["parameters"]))
        _print(console, RESIDUALS, model["residuals"])
        _print_lines(console, *(f"assumed: {line}" for line in model["assumptions"]))
        _print_lines(console, *(f"no projection of {line}" for line in model["refused"]))
    if "comparison" in content:
        comparison = content["comparison"]
        _print_lines(console, "", f"beside {comparison['with']}")
        _print(console, COMPARED, comparison["rows"])
        _print(console, GAINS, comparison["rows"])
        _print_lines(console, *comparison["notes"])


def _print_lines(console: Console, *lines: str) -> None:
    """Print each of `lines` as plain text; Rich does not break it at the width of the console."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print(console: Console, columns: Sequence[Column], rows: Sequence[Row]) -> None:
    heads, lines = cells(columns, rows)
    if heads:
        table = Table()
        for head in heads:
            is_name = head in ("strategy", "exchange")
            table.add_column(head, justify="left" if is_name else "right", overflow="fold")
        for line in lines:
            table.add_row(*line)
        console.print(table)


def cells(
    columns: Sequence[Column], rows: Sequence[Row]
) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return the titles and the cells of a table; empty columns are left out.

    The first columns are those of the layout, such as ranks; then follow `columns`. If all of `columns` are
    empty, so is the table.
    """
    texts = [
        (title, [_text(row, name, form) for row in rows])
        for title, name, form in (*_LAYOUT, *columns)
    ]
    if not any(any(column) for _, column in texts[len(_LAYOUT) :]):
        return [], []
    kept = [(title, column) for title, column in texts if any(column)]
    return [title for title, _ in kept], list(zip(*(column for _, column in kept), strict=True))


def _text(row: Row, name: str, form: Callable[[Any], str]) -> str:
    if name == "speedup" and row.get("repeats") == 0:
        return "failed"
    return "" if row.get(name) is None else form(row[name])


def _largest(values: Iterable[float]) -> str:
    return size(max(values))


def _range(form: Callable[[float], str]) -> Callable[[Sequence[float]], str]:
    return lambda ends: "" if ends[0] == ends[1] else f"{form(ends[0])} to {form(ends[1])}"


_LAYOUT: list[Column] = [
    ("strategy", "strategy", str),
    ("exchange", "exchange", str),
    ("ranks", "ranks", str),
    ("hosts", "hosts", str),
]
_GAINED: list[Column] = [
    ("speed-up", "speedup", _hundredths),
    ("efficiency", "efficiency", _percent),
]
SPEED: list[Column] = [
    ("samples/s", "samples_per_second", three),
    ("range", "samples_per_second_range", _range(three)),
    ("step", "step_seconds", seconds),
    *_GAINED,
]
BY_WALL_TIME: list[Column] = [
    ("wall time", "wall_seconds", seconds),
    ("range", "wall_seconds_range", _range(seconds)),
    *_GAINED,
]
TIMES: list[Column] = [
    ("exchange time", "exchange_share", _percent),
    ("data", "data_share", _percent),
    ("sent/step", "sent_bytes_per_step", size),
    ("start", "start_seconds", seconds),
    ("restart", "restart_seconds", seconds),
]
_MACHINE: list[Column] = [
    ("memory", "host_bytes", _largest),
    ("max/mean", "host_imbalance", _hundredths),
    ("on GPU", "device_bytes", _largest),
    ("max/mean", "device_imbalance", _hundredths),
    ("GPU busy", "device_busy", _percent),
    ("cores", "cpu", _hundredths),
]
PROJECTED: list[Column] = [
    ("samples/s", "samples_per_second", three),
    ("step", "step_seconds", seconds),
    *_GAINED,
]
_PROJECTED_TIMES: list[Column] = [
    ("compute", "compute_seconds", seconds),
    ("exchange time", "exchange_seconds", seconds),
    ("data", "data_seconds", seconds),
]
BESIDE: list[Column] = [
    ("step", "step_seconds", seconds),
    ("tree by hosts", "hosts_step_seconds", seconds),
    ("flat tree", "flat_step_seconds", seconds),
    ("ring, not exact", "ring_step_seconds", seconds),
]
RESIDUALS: list[Column] = [
    ("step", "step_seconds", seconds),
    ("model", "predicted_step_seconds", seconds),
    ("error", "error", lambda value: f"{value:+.1%}"),
    ("not fitted", "left_out", str),
]
COMPARED: list[Column] = [
    ("samples/s", "samples_per_second_here", three),
    ("other", "samples_per_second_there", three),
    ("wall time", "wall_seconds_here", seconds),
    ("other", "wall_seconds_there", seconds),
    ("ratio", "ratio", _hundredths),
]
GAINS: list[Column] = [
    ("speed-up", "speedup_here", _hundredths),
    ("other", "speedup_there", _hundredths),
    ("efficiency", "efficiency_here", _percent),
    ("other", "efficiency_there", _percent),
]


def notes(measured: Sequence[Row]) -> list[str]:
    """Return lines of text to print below the tables, such as warnings about distorted measurements.

    `measured` are the rows of results with a measurement.
    """
    lines = []
    if any(row["measured_by"] == BY_WALL for row in measured):
        lines.append(
            "measured by wall time: the script makes no lockstep.Run, so its steps are not known"
        )
    competing = sorted({row["ranks"] for row in measured if row.get("competing")})
    if competing:
        lines.append(
            f"{', '.join(map(str, competing))} ranks have more threads than this machine has cores: "
            "they share them, and say nothing of machines with a core for each"
        )
    hindered = {row["ranks"]: row["cpu"] for row in measured if _is_hindered(row)}
    if hindered:
        counted = ", ".join(f"{cores:.2f} cores on {ranks}" for ranks, cores in hindered.items())
        lines.append(
            f"ranks had less than a core for the time that they computed ({counted}): other programs "
            "used the machine, or the script waits for something"
        )
    threads = {row.get("threads") for row in measured if row.get("device") == "cpu"}
    if len(threads) > 1:
        counted = ", ".join(f"{row['threads']} on {row['ranks']}" for row in measured)
        lines.append(f"threads of a rank differ: {counted}; --threads T makes them alike")
    against = {row["speedup_against"] for row in measured if row.get("speedup_against")}
    lines += [
        f"speed-up and efficiency are against {ranks} ranks" for ranks in sorted(against - {1})
    ]
    return lines


def _is_hindered(row: Row) -> bool:
    """Whether ranks had much less than one core while they computed, as on a busy machine."""
    known = row.get("device") == "cpu" and row.get("cpu") and not row.get("competing")
    return bool(known) and row["cpu"] < _UNHINDERED * row["compute_seconds"] / row["step_seconds"]


def failures(rows: Sequence[Row]) -> list[str]:
    """Return an error message for each row of results with a launch that failed."""
    return [f"failed on {label(row)}: {row['verdict']}" for row in rows if row.get("verdict")]


def parameters(row: Row) -> str:
    """Return a line of text with the parameters of a step-time model, such as overhead and latency."""
    given = dict.fromkeys(row["given"], " (given)")

    def speed(level: str) -> str:
        bandwidth = row[f"{level}bandwidth_bytes_per_second"]
        fast = "not limited" if bandwidth is None else f"{size(bandwidth)}/s"
        return (
            f"latency {seconds(row[f'{level}latency_seconds'])}{given.get(f'{level}latency', '')}, "
            f"bandwidth {fast}{given.get(f'{level}bandwidth', '')}"
        )

    named = "/".join(filter(None, (row["strategy"], row["exchange"]))) or "model"
    return (
        f"{named}: overhead {seconds(row['overhead_seconds'])} a step, "
        f"compute {seconds(row['compute_seconds_per_sample'])} a sample, "
        f"data {seconds(row['data_seconds_per_sample'])} a sample, "
        f"{speed('')}; within a host {speed('local_')}; {size(row['shared_bytes'])} shared in "
        f"{row['sums']:g} sum{'s' if row['sums'] > 1 else ''} by exchange {row['exchange_modelled']}"
    )
