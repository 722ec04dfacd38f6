"""Make the rows of results of `lockstep bench`: one for each combination of ranks, strategy, exchange.

A row summarizes all launches with its combination.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lockstep.tools.bench.combinations import Combination
from lockstep.tools.bench.measuring import Measurements
from lockstep.tools.quantities import rounded

Row = dict[str, Any]

#: Ways to measure the rate of a row: by recorded steps, or by the wall time of the script.
BY_STEPS, BY_WALL = "steps", "wall time"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result of one launch of the script: exit code, duration and measurements."""

    combination: Combination
    exit_code: int
    wall_seconds: float  # of the whole launch
    measured: Measurements | None = None  # `None` for a script without `lockstep.Run`
    identity: Mapping[str, object] = field(default_factory=dict)
    digest: str | None = None
    verdict: str = ""  # why the launch is no measurement


def row(
    combination: Combination, trials: Sequence[Trial], restart: float | None, cores: int
) -> Row:
    """Return the row of results for one combination of ranks, strategy and exchange.

    `trials` are its launches in order, of which only the last may have failed. `restart` is the measured
    time of a restart in seconds. `cores` is the number of cores of this machine.
    """
    good = [trial for trial in trials if not trial.verdict]
    failed = next((trial for trial in trials if trial.verdict), None)
    made: Row = {
        "ranks": combination.ranks,
        "strategy": combination.strategy,
        "exchange": combination.exchange,
        "repeats": len(good),
        "exit_code": failed.exit_code if failed else 0,
        "verdict": failed.verdict if failed else None,
    }
    if good:
        made |= _spread("wall_seconds", [trial.wall_seconds for trial in good])
        made |= _of_runs(good, restart, cores)
    return made


def _of_runs(trials: Sequence[Trial], restart: float | None, cores: int) -> Row:
    """Return the fields of a row that come from the records of the launched runs.

    For a script without `lockstep.Run`, which records nothing, the only field is `measured_by`. `restart`
    is the measured time of a restart in seconds. `cores` is the number of cores of this machine.
    """
    runs = [trial.measured for trial in trials if trial.measured is not None]
    if not runs:
        return {"measured_by": BY_WALL}
    last, identity = runs[-1], trials[-1].identity
    threads = identity.get("threads")
    threads = threads if isinstance(threads, int) else 1
    host, device = _largest(run.host for run in runs), _largest(run.device for run in runs)
    return {
        "measured_by": BY_STEPS,
        "steps": last.steps,
        "batch": rounded(last.batch),
        "replicas": identity.get("replicas"),
        "threads": identity.get("threads"),
        "device": identity.get("device"),
        "devices": list(last.devices),
        "strategy_used": last.strategy,
        "exchange_used": last.exchange,
        "digest": trials[-1].digest,
        **_spread("samples_per_second", [run.batch / run.step_seconds for run in runs]),
        **_spread("step_seconds", [run.step_seconds for run in runs]),
        "slowest_step_seconds": rounded(max(run.slowest_step for run in runs)),
        "compute_seconds": _median(run.compute_seconds for run in runs),
        "exchange_seconds": _median(run.exchange_seconds for run in runs),
        "data_seconds": _median(run.data_seconds for run in runs),
        "exchange_share": _median(run.exchange_share for run in runs),
        "data_share": _median(run.data_share for run in runs),
        "sent_bytes_per_step": _median(run.sent for run in runs),
        "gradient_bytes": last.gradients,
        "host_bytes": host,
        "host_imbalance": rounded(max(host) / statistics.fmean(host)) if host else None,
        "device_bytes": device,
        "device_imbalance": rounded(max(device) / statistics.fmean(device)) if device else None,
        "device_busy": _median(run.busy for run in runs),
        "cpu": _median(run.cpu for run in runs),
        "start_seconds": _median(run.start_seconds for run in runs),
        "restart_seconds": rounded(restart),
        # Whether ranks have less than one core for each of their threads.
        "competing": identity.get("device") == "cpu"
        and trials[-1].combination.ranks * threads > cores,
    }


def add_speedups(rows: Sequence[Row]) -> None:
    """Add the fields `speedup` and `efficiency` to each row.

    The baseline of a row is the row with the fewest ranks of the same strategy and exchange. A row of one
    rank is a baseline for all exchanges, since one rank exchanges nothing.
    """
    for one in rows:
        known = [row for row in rows if rate(row) is not None and belongs(row, group(one))]
        base = min(known, key=lambda row: row["ranks"], default=None)
        if base is None or rate(one) is None:
            one |= {"speedup": None, "efficiency": None, "speedup_against": None}
            continue
        gain = rate(one) / rate(base)
        one["speedup"] = rounded(gain)
        one["efficiency"] = rounded(gain * base["ranks"] / one["ranks"])
        one["speedup_against"] = base["ranks"]


def rate(one: Mapping[str, Any]) -> Any:
    """Return a row's samples per second, or its launches per second if steps are not known, or `None`."""
    if one.get("samples_per_second") is not None:
        return one["samples_per_second"]
    return 1 / one["wall_seconds"] if one.get("wall_seconds") else None


def devices(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return the names of all devices on which `rows` of results were measured, joined by commas."""
    found = {name for row in rows for name in row.get("devices") or ()}
    return ", ".join(sorted(found)) or "not known"


def label(row: Mapping[str, Any]) -> str:
    """Return a text such as `4 ranks with ddp over tree` for a row of results."""
    return str(Combination(row["ranks"], row.get("strategy"), row.get("exchange")))


def group(one: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the (strategy, exchange) of a row; rows with equal pairs form one line in charts."""
    return one.get("strategy"), one.get("exchange")


def belongs(one: Mapping[str, Any], to: tuple[str | None, str | None]) -> bool:
    """Whether a row has the (strategy, exchange) of `to`; with one rank, `None` equals any value."""
    return all(
        mine == theirs or (one["ranks"] == 1 and mine is None)
        for mine, theirs in zip(group(one), to, strict=True)
    )


def _spread(name: str, values: Sequence[float]) -> Row:
    """Return a row with two fields: `NAME`, the median of `values`, and `NAME_range`, their range."""
    return {
        name: rounded(statistics.median(values)),
        f"{name}_range": [rounded(min(values)), rounded(max(values))],
    }


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return rounded(statistics.median(known)) if known else None


def _largest(peaks: Iterable[Mapping[int, int]]) -> list[int] | None:
    """Return each rank's largest memory peak over several runs, in the order of ranks.

    `peaks` has the bytes by rank, for each run. Return `None` if there are none.
    """
    merged: dict[int, int] = {}
    for one in peaks:
        merged |= {rank: max(value, merged.get(rank, 0)) for rank, value in one.items()}
    return [merged[rank] for rank in sorted(merged)] or None
