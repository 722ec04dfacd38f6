"""Results as tables and lines for a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from lockstep.tools.bench import quantities
from lockstep.tools.bench.results import BY_WALL, Row

#: Of a column: its title, and what of a row stands in it, if anything.
Column = tuple[str, Callable[[Row], str]]

#: Cores' worth of a rank, of the share of the time that it computes.
_UNHINDERED = 0.8


def show(content: Mapping[str, Any], console: Console) -> None:
    """Print the content of a file of results."""
    rows = content["results"]
    measured = [row for row in rows if row.get("measured_by")]
    if measured:
        by_wall = all(row["measured_by"] == BY_WALL for row in measured)
        _print(console, _BY_WALL if by_wall else _SPEED, rows)
        _print(console, _TIMES, measured)
        _print(console, _MACHINE, measured)
    _say(console, *_notes(measured), *_failures(rows))
    if "model" in content:
        _show_projection(content, console)
    if "comparison" in content:
        _show_comparison(content["comparison"], console)


def _say(console: Console, *lines: str) -> None:
    """Print lines as they are: a terminal wraps them, a file does not."""
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _print(console: Console, columns: Sequence[Column], rows: Sequence[Row]) -> None:
    """Print rows, without the columns in which no row has anything."""
    cells = {title: [take(row) for row in rows] for title, take in columns}
    kept = {title: texts for title, texts in cells.items() if any(texts)}
    if not kept.keys() - {title for title, _ in _LAYOUT}:
        return
    table = Table()
    for title in kept:
        is_name = title in ("strategy", "exchange")
        table.add_column(title, justify="left" if is_name else "right", overflow="fold")
    for line in zip(*kept.values(), strict=True):
        table.add_row(*line)
    console.print(table)


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


def percent(share: float) -> str:
    """Return a share in percent."""
    return f"{share:.1%}"


def _sizes(values: Iterable[float]) -> str:
    return quantities.size(max(values))


def _speedup(row: Row) -> str:
    if not row.get("repeats"):
        return "failed"
    return "" if row.get("speedup") is None else f"{row['speedup']:.2f}"


_LAYOUT: list[Column] = [
    ("strategy", _value("strategy", str)),
    ("exchange", _value("exchange", str)),
    ("ranks", _value("ranks", str)),
]
_SPEED: list[Column] = [
    *_LAYOUT,
    ("samples/s", _value("samples_per_second", quantities.three)),
    ("range", _range("samples_per_second", quantities.three)),
    ("step", _value("step_seconds", quantities.seconds)),
    ("speed-up", _speedup),
    ("efficiency", _value("efficiency", percent)),
]
_BY_WALL: list[Column] = [
    *_LAYOUT,
    ("wall time", _value("wall_seconds", quantities.seconds)),
    ("range", _range("wall_seconds", quantities.seconds)),
    ("speed-up", _speedup),
    ("efficiency", _value("efficiency", percent)),
]
_TIMES: list[Column] = [
    *_LAYOUT,
    ("exchange time", _value("exchange_share", percent)),
    ("data", _value("data_share", percent)),
    ("sent/step", _value("sent_bytes_per_step", quantities.size)),
    ("start", _value("start_seconds", quantities.seconds)),
    ("restart", _value("restart_seconds", quantities.seconds)),
]
_MACHINE: list[Column] = [
    *_LAYOUT,
    ("memory", _value("host_bytes", _sizes)),
    ("max/mean", _value("host_imbalance", lambda value: f"{value:.2f}")),
    ("on GPU", _value("device_bytes", _sizes)),
    ("max/mean ", _value("device_imbalance", lambda value: f"{value:.2f}")),
    ("GPU busy", _value("device_busy", percent)),
    ("cores", _value("cpu", lambda value: f"{value:.2f}")),
]
_PROJECTED: list[Column] = [
    *_LAYOUT,
    ("samples/s", _value("samples_per_second", quantities.three)),
    ("step", _value("step_seconds", quantities.seconds)),
    ("speed-up", _value("speedup", lambda value: f"{value:.2f}")),
    ("efficiency", _value("efficiency", percent)),
]
_PROJECTED_TIMES: list[Column] = [
    *_LAYOUT,
    ("compute", _value("compute_seconds", quantities.seconds)),
    ("exchange time", _value("exchange_seconds", quantities.seconds)),
    ("data", _value("data_seconds", quantities.seconds)),
]
_RESIDUALS: list[Column] = [
    *_LAYOUT,
    ("step", _value("step_seconds", quantities.seconds)),
    ("model", _value("predicted_step_seconds", quantities.seconds)),
    ("error", _value("error", lambda value: f"{value:+.1%}")),
    ("not fitted", _value("left_out", str)),
]
_COMPARED: list[Column] = [
    *_LAYOUT,
    ("samples/s", _value("samples_per_second_here", quantities.three)),
    ("other", _value("samples_per_second_there", quantities.three)),
    ("wall time", _value("wall_seconds_here", quantities.seconds)),
    ("other ", _value("wall_seconds_there", quantities.seconds)),
    ("ratio", _value("ratio", lambda value: f"{value:.2f}")),
]
_GAINS: list[Column] = [
    *_LAYOUT,
    ("speed-up", _value("speedup_here", lambda value: f"{value:.2f}")),
    ("other", _value("speedup_there", lambda value: f"{value:.2f}")),
    ("efficiency", _value("efficiency_here", percent)),
    ("other ", _value("efficiency_there", percent)),
]


def _notes(measured: Sequence[Row]) -> list[str]:
    """Return what a reader of the tables has to know."""
    said = []
    if any(row["measured_by"] == BY_WALL for row in measured):
        said.append(
            "measured by wall time: the script makes no lockstep.Run, so its steps are not known"
        )
    competing = sorted({row["ranks"] for row in measured if row.get("competing")})
    if competing:
        said.append(
            f"{_several(competing)} ranks have more threads than this machine has cores: they share them, "
            "and say nothing of machines with a core for each"
        )
    hindered = {row["ranks"]: row["cpu"] for row in measured if _is_hindered(row)}
    if hindered:
        counted = ", ".join(f"{cores:.2f} cores on {ranks}" for ranks, cores in hindered.items())
        said.append(
            f"ranks had less than a core for the time that they computed ({counted}): other programs "
            "used the machine, or the script waits for something"
        )
    threads = {row.get("threads") for row in measured if row.get("device") == "cpu"}
    if len(threads) > 1:
        counted = ", ".join(f"{row['threads']} on {row['ranks']}" for row in measured)
        said.append(f"threads of a rank differ: {counted}; --threads T makes them alike")
    against = {row["speedup_against"] for row in measured if row.get("speedup_against")}
    said += [
        f"speed-up and efficiency are against {ranks} ranks" for ranks in sorted(against - {1})
    ]
    return said


def _is_hindered(row: Row) -> bool:
    """Return whether ranks used much less of a core than the time that they computed."""
    known = row.get("device") == "cpu" and row.get("cpu") and not row.get("competing")
    return bool(known) and row["cpu"] < _UNHINDERED * row["compute_seconds"] / row["step_seconds"]


def _several(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _failures(rows: Sequence[Row]) -> list[str]:
    return [f"failed on {_named(row)}: {row['verdict']}" for row in rows if row.get("verdict")]


def _named(row: Row) -> str:
    held = f" with {row['strategy']}" if row["strategy"] else ""
    met = f" over {row['exchange']}" if row["exchange"] else ""
    return f"{row['ranks']} rank{'s' if row['ranks'] > 1 else ''}{held}{met}"


def _show_projection(content: Mapping[str, Any], console: Console) -> None:
    model = content["model"]
    if content["projection"]:
        _say(console, "", f"projection: {model['formula']}")
        _print(console, _PROJECTED, content["projection"])
        _print(console, _PROJECTED_TIMES, content["projection"])
    _say(console, *map(_parameters, model["parameters"]))
    _print(console, _RESIDUALS, model["residuals"])
    _say(console, *(f"assumed: {line}" for line in model["assumptions"]))
    _say(console, *(f"no projection of {line}" for line in model["refused"]))


def _parameters(row: Row) -> str:
    """Return the parameters of one model in one line."""
    bandwidth = row["bandwidth_bytes_per_second"]
    fast = "not limited" if bandwidth is None else f"{quantities.size(bandwidth)}/s"
    given = {name: " (given)" if name in row["given"] else "" for name in ("bandwidth", "latency")}
    named = "/".join(filter(None, (row["strategy"], row["exchange"]))) or "model"
    return (
        f"{named}: overhead {quantities.seconds(row['overhead_seconds'])} a step, "
        f"compute {quantities.seconds(row['compute_seconds_per_sample'])} a sample, "
        f"data {quantities.seconds(row['data_seconds_per_sample'])} a sample, "
        f"latency {quantities.seconds(row['latency_seconds'])}{given['latency']}, "
        f"bandwidth {fast}{given['bandwidth']}, {quantities.size(row['shared_bytes'])} shared in "
        f"{row['sums']:g} sum{'s' if row['sums'] > 1 else ''} by exchange {row['exchange_modelled']}"
    )


def _show_comparison(comparison: Mapping[str, Any], console: Console) -> None:
    _say(console, "", f"beside {comparison['with']}")
    _print(console, _COMPARED, comparison["rows"])
    _print(console, _GAINS, comparison["rows"])
    _say(console, *comparison["notes"])
