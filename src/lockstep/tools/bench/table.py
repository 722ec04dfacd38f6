"""Results as tables and lines for a terminal; the page of charts has the same columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lockstep.tools.bench.results import BY_WALL, Row, label
from lockstep.tools.quantities import seconds, size, three

#: A column: its title, and the text of a row in it, if any.
Column = tuple[str, Callable[[Row], str]]

#: Cores' worth of a rank, of the share of the time that it computes.
_UNHINDERED = 0.8


def show(content: Mapping[str, Any], console: Console) -> None:
    """Print the content of a file of results."""
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
    """Print lines as they are: a terminal wraps them, a file does not."""
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
    """Return the titles and the lines of a table: layout and `columns`, without those that are empty."""
    texts = [(title, [take(row) for row in rows]) for title, take in (*_LAYOUT, *columns)]
    if not any(any(column) for _, column in texts[len(_LAYOUT) :]):
        return [], []
    kept = [(title, column) for title, column in texts if any(column)]
    return [title for title, _ in kept], list(zip(*(column for _, column in kept), strict=True))


def _value(name: str, form: Callable[[Any], str]) -> Callable[[Row], str]:
    def take(row: Row) -> str:
        value = row.get(name)
        return "" if value is None else form(value)

    return take


def _range(name: str, form: Callable[[Any], str]) -> Callable[[Row], str]:
    def take(row: Row) -> str:
        low, high = row.get(f"{name}_range") or (None, None)
        return "" if low == high else f"{form(low)} to {form(high)}"

    return take


def _percent(share: float) -> str:
    return f"{share:.1%}"


def _hundredths(value: float) -> str:
    return f"{value:.2f}"


def _largest(values: Iterable[float]) -> str:
    return size(max(values))


def _speedup(row: Row) -> str:
    return _value("speedup", _hundredths)(row) if row.get("repeats") else "failed"


_LAYOUT: list[Column] = [
    ("strategy", _value("strategy", str)),
    ("exchange", _value("exchange", str)),
    ("ranks", _value("ranks", str)),
]
_GAINED: list[Column] = [("speed-up", _speedup), ("efficiency", _value("efficiency", _percent))]
SPEED: list[Column] = [
    ("samples/s", _value("samples_per_second", three)),
    ("range", _range("samples_per_second", three)),
    ("step", _value("step_seconds", seconds)),
    *_GAINED,
]
BY_WALL_TIME: list[Column] = [
    ("wall time", _value("wall_seconds", seconds)),
    ("range", _range("wall_seconds", seconds)),
    *_GAINED,
]
TIMES: list[Column] = [
    ("exchange time", _value("exchange_share", _percent)),
    ("data", _value("data_share", _percent)),
    ("sent/step", _value("sent_bytes_per_step", size)),
    ("start", _value("start_seconds", seconds)),
    ("restart", _value("restart_seconds", seconds)),
]
_MACHINE: list[Column] = [
    ("memory", _value("host_bytes", _largest)),
    ("max/mean", _value("host_imbalance", _hundredths)),
    ("on GPU", _value("device_bytes", _largest)),
    ("max/mean", _value("device_imbalance", _hundredths)),
    ("GPU busy", _value("device_busy", _percent)),
    ("cores", _value("cpu", _hundredths)),
]
PROJECTED: list[Column] = [
    ("samples/s", _value("samples_per_second", three)),
    ("step", _value("step_seconds", seconds)),
    ("speed-up", _value("speedup", _hundredths)),
    ("efficiency", _value("efficiency", _percent)),
]
_PROJECTED_TIMES: list[Column] = [
    ("compute", _value("compute_seconds", seconds)),
    ("exchange time", _value("exchange_seconds", seconds)),
    ("data", _value("data_seconds", seconds)),
]
RESIDUALS: list[Column] = [
    ("step", _value("step_seconds", seconds)),
    ("model", _value("predicted_step_seconds", seconds)),
    ("error", _value("error", lambda value: f"{value:+.1%}")),
    ("not fitted", _value("left_out", str)),
]
COMPARED: list[Column] = [
    ("samples/s", _value("samples_per_second_here", three)),
    ("other", _value("samples_per_second_there", three)),
    ("wall time", _value("wall_seconds_here", seconds)),
    ("other", _value("wall_seconds_there", seconds)),
    ("ratio", _value("ratio", _hundredths)),
]
GAINS: list[Column] = [
    ("speed-up", _value("speedup_here", _hundredths)),
    ("other", _value("speedup_there", _hundredths)),
    ("efficiency", _value("efficiency_here", _percent)),
    ("other", _value("efficiency_there", _percent)),
]


def notes(measured: Sequence[Row]) -> list[str]:
    """Return what a reader of the tables has to know."""
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
    """Return whether ranks used much less of a core than the time that they computed."""
    known = row.get("device") == "cpu" and row.get("cpu") and not row.get("competing")
    return bool(known) and row["cpu"] < _UNHINDERED * row["compute_seconds"] / row["step_seconds"]


def failures(rows: Sequence[Row]) -> list[str]:
    """Return the verdict of each row that failed."""
    return [f"failed on {label(row)}: {row['verdict']}" for row in rows if row.get("verdict")]


def parameters(row: Row) -> str:
    """Return the parameters of one model in one line."""
    bandwidth = row["bandwidth_bytes_per_second"]
    fast = "not limited" if bandwidth is None else f"{size(bandwidth)}/s"
    given = {name: " (given)" if name in row["given"] else "" for name in ("bandwidth", "latency")}
    named = "/".join(filter(None, (row["strategy"], row["exchange"]))) or "model"
    return (
        f"{named}: overhead {seconds(row['overhead_seconds'])} a step, "
        f"compute {seconds(row['compute_seconds_per_sample'])} a sample, "
        f"data {seconds(row['data_seconds_per_sample'])} a sample, "
        f"latency {seconds(row['latency_seconds'])}{given['latency']}, "
        f"bandwidth {fast}{given['bandwidth']}, {size(row['shared_bytes'])} shared in "
        f"{row['sums']:g} sum{'s' if row['sums'] > 1 else ''} by exchange {row['exchange_modelled']}"
    )
