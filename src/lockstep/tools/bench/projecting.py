"""Predict step times on other layouts: by a model fitted to measurements, or from given numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.errors import UsageError
from lockstep.registry import STRATEGIES
from lockstep.tools.bench.comparing import FORMAT
from lockstep.tools.bench.projection import (
    Batches,
    Cost,
    FitPoint,
    Link,
    Model,
    Parameters,
    buckets_of,
    cost_of,
    fit_model,
)
from lockstep.tools.bench.results import BY_STEPS, Row, belongs, group
from lockstep.tools.bench.traffic import SHARDED, Layout, ReduceAlgorithm
from lockstep.tools.quantities import rounded, seconds, size

#: Kind of a results file without a measurement.
_KIND = "arithmetic"
#: Strategies whose ranks do not each compute a share of the samples.
_NOT_SHARED = STRATEGIES.where(lambda one: one.scatters or one.spreads)
_UNEVEN = "with {} ranks do not share the samples evenly; there is no model of that"
_NO_BATCH = "the samples of a step are neither the same on all layouts nor the same for each rank"
_NO_EXCHANGE = (
    "no layout with several ranks is left to fit the exchange to; --bandwidth says its cost"
)
_NO_LOCAL = (
    "no layout with several ranks of one host is left to fit the speed within a host to; "
    "--local-bandwidth says it"
)
_FORMULA = (
    "step = overhead + compute * samples + data * samples + latency * messages + bytes / bandwidth, the "
    "last two between hosts and within a host"
)
_COMPETES = "more threads than cores: ranks wait for each other's cores"


@dataclass(slots=True)
class Projection:
    """Predicted step times for the wanted layouts, as rows, and the models that predict them."""

    rows: list[Row] = field(default_factory=list)  # one per number of ranks and group of results
    parameters: list[Row] = field(default_factory=list)  # one row per group
    residuals: list[Row] = field(default_factory=list)  # one per measured point
    assumptions: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # why a group has no projection

    def content(self) -> dict[str, Any]:
        """Return the fields `projection` and `model` of the results file, in JSON's types."""
        model = {"formula": _FORMULA, **asdict(self)}
        return {"projection": model.pop("rows"), "model": model}


def project(rows: Sequence[Row], wanted: Sequence[Layout], link: Link) -> Projection:
    """Fit a model to the measured `rows` of each strategy and exchange, and predict step times.

    `wanted` are the layouts to predict for. `link` has the network speeds that the user has given.
    """
    done = Projection()
    is_alone = all(one["ranks"] == 1 for one in rows)
    for of in dict.fromkeys(group(one) for one in rows if one["ranks"] > 1 or is_alone):
        _project_group(done, of, [one for one in rows if belongs(one, of)], wanted, link)
    return done


def _project_group(
    done: Projection,
    of: tuple[str | None, str | None],
    members: Sequence[Row],
    wanted: Sequence[Layout],
    link: Link,
) -> None:
    usable = [one for one in members if one.get("measured_by") == BY_STEPS]
    # On one rank, another strategy may have replaced the one that was asked for.
    several = [one["strategy_used"] for one in usable if one["ranks"] > 1]
    alone = [of[0] or one["strategy_used"] for one in usable]
    strategy = next(reversed(several or alone), of[0])
    points = [
        FitPoint(
            layout=_layout(one),
            batch=one["batch"],
            replicas=one["replicas"] or one["ranks"],
            step=one["step_seconds"],
            data=one["data_seconds"],
            exchange=one["exchange_seconds"] if one["ranks"] > 1 else 0.0,
            left_out=_COMPETES if one["competing"] else "",
        )
        for one in usable
    ]
    used = [point for point in points if not point.left_out]
    batches = Batches.of(used) if used else None
    cost = _cost(usable, strategy)
    why = _refusal(strategy, usable, used, batches, cost, wanted, link)
    if why is not None or batches is None or cost is None:
        named = "/".join(filter(None, of)) or "the script's own strategy"
        done.refused.append(f"{named}: {why}")
        return
    fitted = fit_model(points, cost, batches)
    model = fitted.over(link)
    names = {"strategy": of[0], "exchange": of[1]}
    done.parameters.append(names | _parameters_of(model, link))
    done.residuals += [names | _residual(fitted, point) for point in points]
    base = min(usable, key=lambda one: one["ranks"])
    each = base["samples_per_second"] / base["ranks"]
    done.rows += [names | _row_of(model, layout, each) for layout in wanted]
    assumed = _assumptions(model, cost, link, used, wanted)
    done.assumptions += [line for line in assumed if line not in done.assumptions]


def _cost(usable: Sequence[Row], strategy: str | None) -> Cost | None:
    """Return exchange, algorithm and bytes of the gradient sums in a step of the row with the most ranks.

    `usable` are measured rows of one strategy and exchange. Return `None` if there are none, or if the
    bytes are not known.
    """
    if not usable:
        return None
    last = max(usable, key=lambda one: one["ranks"])
    several = last["ranks"] > 1
    sent, gradients = last.get("sent_bytes_per_step"), last.get("gradient_bytes")
    if strategy in SHARDED and gradients is not None:
        gradients *= last["ranks"]  # each rank records only its share of the gradients
    return cost_of(
        last.get("exchange_used") or "none" if several else "tree",
        strategy,
        sent=(_layout(last), sent) if several and sent is not None else None,
        gradients=gradients,
        on_cpu=last["device"] == "cpu",
    )


def _layout(one: Row) -> Layout:
    """Return the layout of a row of results; a row without the field `hosts` was measured on one host."""
    hosts = one.get("hosts", 1)
    return Layout(hosts, one["ranks"] // hosts)


def _refusal(
    strategy: str | None,
    usable: Sequence[Row],
    used: Sequence[FitPoint],
    batches: Batches | None,
    cost: Cost | None,
    wanted: Sequence[Layout],
    link: Link,
) -> str | None:
    """Return why rows of one strategy and exchange give no prediction for `wanted`; `None` if they do.

    `usable`: the rows whose steps were measured. `used`: a point for each usable row that the fit can use.
    `batches` and `cost` are `None` if they are not known. `link` has the network speeds that are given.
    """
    needs_exchange = link.bandwidth is None
    needs_local = link.local_bandwidth is None and any(
        one.hosts > 1 and one.per_host > 1 for one in wanted
    )
    checks = [
        (strategy in _NOT_SHARED, _UNEVEN.format(strategy)),
        (not usable, "no steps were measured"),
        (not used, "every layout has more threads than this machine has cores"),
        (batches is None, _NO_BATCH),
        (cost is None, "the bytes that its exchange sends are not recorded"),
        (needs_exchange and all(one.ranks == 1 for one in used), _NO_EXCHANGE),
        (needs_local and all(one.layout.per_host == 1 for one in used), _NO_LOCAL),
    ]
    return next((why for applies, why in checks if applies), None)


def _residual(model: Model, point: FitPoint) -> Row:
    """Return a row with the measured step time of `point`, the predicted one and its relative error."""
    predicted = model.step(point.layout)
    return {
        "ranks": point.ranks,
        "hosts": point.layout.hosts,
        "step_seconds": point.step,
        "predicted_step_seconds": rounded(predicted),
        "error": rounded(predicted / point.step - 1),
        "left_out": point.left_out or None,
    }


def _parameters_of(model: Model, link: Link) -> Row:
    """Return the parameters of a step-time model as a dictionary, for the table of results.

    The element `given` lists the names of the parameters that the user has set in `link`.
    """
    per_byte = model.parameters.seconds_per_byte
    local = model.parameters.local_seconds_per_byte
    return {
        **{name: rounded(value) for name, value in asdict(model.parameters).items()},
        "bandwidth_bytes_per_second": rounded(1 / per_byte) if per_byte else None,
        "local_bandwidth_bytes_per_second": rounded(1 / local) if local else None,
        "given": [name for name, value in asdict(link).items() if value is not None],
        "exchange_modelled": model.cost.exchange,
        "shared_bytes": rounded(model.cost.volume),
        "sums": rounded(model.cost.sums),
        "batch": rounded(model.batches.total),
        "batch_per_rank": model.batches.per_rank,
    }


def _row_of(model: Model, layout: Layout, rate_of_rank: float) -> Row:
    """Return the predicted step time and speed on a layout, as a row of the results file.

    On several hosts the row may also have, for comparison, the step times if gradients were summed by other
    algorithms. `rate_of_rank`: measured samples per second of one rank.
    """
    ranks = layout.ranks
    efficiency = model.rate(layout) / ranks / rate_of_rank
    row = {
        "ranks": ranks,
        "hosts": layout.hosts,
        "samples_per_second": rounded(model.rate(layout)),
        "step_seconds": rounded(model.step(layout)),
        "speedup": rounded(efficiency * ranks),
        "efficiency": rounded(efficiency),
        "compute_seconds": rounded(model.compute(ranks)),
        "exchange_seconds": rounded(model.exchange(layout)),
        "data_seconds": rounded(model.data(ranks)),
    }
    if model.cost.way in _BESIDE and layout.hosts > 1:
        row |= {name: rounded(model.by(way).step(layout)) for way, name in _BESIDE.items()}
    return row


#: Algorithms for summing the same bytes of gradients over ranks, each with the field of a row for the
#: predicted step time.
_BESIDE = {
    ReduceAlgorithm.HOSTS: "hosts_step_seconds",
    ReduceAlgorithm.FLAT: "flat_step_seconds",
    ReduceAlgorithm.RING: "ring_step_seconds",
}


def _assumptions(
    model: Model, cost: Cost, link: Link, used: Sequence[FitPoint], wanted: Sequence[Layout]
) -> list[str]:
    """Return the assumptions of a prediction of step times as lines of text.

    `model`: fitted to the measured points `used`. `cost`: what an exchange sends in a step. `link`: speeds
    of the network that the user has given. `wanted`: the layouts to predict for.
    """
    batches = model.batches
    lines = [
        f"fitted to {', '.join(str(one.layout) for one in used)} ranks, medians of the repeats",
        "every rank has a processor of its own, as fast as the measured ones",
    ]
    each = f"{batches.total:.4g} samples"
    if batches.per_rank:
        lines.append(f"each rank has {each} in a step: the batch grows with the ranks")
    else:
        lines.append(f"a step has {each} on any number of ranks; a rank computes at least one")
        if batches.replicas is not None:
            many = f"on more than {batches.replicas} ranks"
            lines.append(f"{many} a run has as many replicas as ranks")
    return lines + _on_fit(model, cost, link, used) + _on_traffic(model, link, wanted)


def _on_fit(model: Model, cost: Cost, link: Link, used: Sequence[FitPoint]) -> list[str]:
    """Return lines of text that say what the fit assumes about the exchange of gradients.

    `cost`: the exchange that was measured; that of `model` may be another, for several hosts. `link`: the
    bandwidths that the user gave. `used`: the measured points.
    """
    several = [one for one in used if one.ranks > 1]
    lines = []
    if link.bandwidth is None:
        lines.append("what of the exchange is hidden behind the backward pass stays hidden")
    if model.cost.exchange != cost.exchange:
        between = f"over a link between hosts the exchange is {model.cost.exchange}"
        lines.append(f"{cost.exchange} was measured; {between}")
    elif cost.exchange == "shared-memory":
        lines.append("all ranks are on one host, whose memory is as fast for more of them")
    if len(several) == 1 and None in (link.bandwidth, link.latency):
        lines.append(
            f"only {several[0].ranks} ranks were measured: bandwidth and latency are not told apart"
        )
    if several and all(one.exchange is None for one in several):
        lines.append(
            "the exchange is not measured apart from computing: it is fitted to the whole step"
        )
    return lines


def _on_traffic(model: Model, link: Link, wanted: Sequence[Layout]) -> list[str]:
    """Return lines of text that explain which messages and bytes of gradients the model counts."""
    way = model.cost.way
    lines = [_COUNTED[way if any(one.hosts > 1 for one in wanted) else _ON_ONE_HOST.get(way, way)]]
    if link.bandwidth is not None:
        lines.append("over the given link nothing of the exchange is hidden")
    return lines


_COUNTED = {
    ReduceAlgorithm.HOSTS: "ranks sum within their host first; then a rank sends "
    "2 (H - 1) messages per sum to other hosts (2 log2 H by recursive halving), and each of H hosts "
    "(C + 1) (H - 1) / H of the shared bytes, for C tree nodes of a host",
    ReduceAlgorithm.FLAT: "each rank sends its share to each other one, whichever host it is on",
    ReduceAlgorithm.RING: "a rank sends 2 (N - 1) messages per sum, and 2 (N - 1) / N of the shared bytes",
    ReduceAlgorithm.SERVERS: "all ranks send their gradients over the one link of each server",
}
_ON_ONE_HOST = {
    ReduceAlgorithm.HOSTS: ReduceAlgorithm.RING,
    ReduceAlgorithm.FLAT: ReduceAlgorithm.RING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAssumptions:
    """Gradient size and computing time of a step, given by the user to predict step times from."""

    gradients: float  # bytes of all gradients
    compute: float  # seconds of a step without the exchange, on any number of ranks
    wanted: Sequence[Layout]
    link: Link
    on_cpu: bool  # whether ranks are on CPUs, where the exchange `tree` sums within each host first

    def __post_init__(self) -> None:
        if not self.compute:
            raise UsageError(
                "--compute is 0; expected the time of a step without its exchange",
                hint="for example --compute 300ms",
            )
        for flag, value, is_needed in (
            ("--bandwidth", self.link.bandwidth, any(one.hosts > 1 for one in self.wanted)),
            (
                "--local-bandwidth",
                self.link.local_bandwidth,
                any(one.per_host > 1 for one in self.wanted),
            ),
        ):
            if is_needed and value is None:
                raise UsageError(
                    f"--project without SCRIPT and without {flag}; expected it, since nothing is measured",
                    hint=f"for example {flag} 100GB/s",
                )

    def content(self) -> dict[str, Any]:
        """Return the content of a results file, with the predicted step time on each wanted layout."""
        way = ReduceAlgorithm.HOSTS if self.on_cpu else ReduceAlgorithm.FLAT
        cost = Cost("tree", self.gradients, buckets_of(self.gradients), way)
        batches = Batches(1, per_rank=True, replicas=None)
        model = Model(Parameters(overhead_seconds=self.compute), cost, batches).over(self.link)
        names = {"strategy": None, "exchange": None}
        rows = [names | _row_of(model, layout, 1 / self.compute) for layout in self.wanted]
        done = Projection(
            rows=[row | {"samples_per_second": None} for row in rows],
            parameters=[names | _parameters_of(model, self.link)],
            assumptions=[
                f"nothing was measured; gradients of {size(self.gradients)} are given",
                f"every rank computes for {seconds(self.compute)} in each step, as given",
                *_on_traffic(model, self.link, self.wanted),
            ],
        )
        return {"format": FORMAT, "kind": _KIND, "results": [], **done.content()}
