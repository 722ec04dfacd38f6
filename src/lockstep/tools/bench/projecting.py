"""Fit the model of the step time to measured rows, and compute rows of a projection from the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.registry import STRATEGIES
from lockstep.tools.bench.projection import (
    AT_SERVERS,
    SHARDED,
    Batches,
    Cost,
    Link,
    Model,
    Point,
    cost_of,
    fit_model,
)
from lockstep.tools.bench.results import BY_STEPS, Row, belongs, group
from lockstep.tools.quantities import rounded

#: Strategies whose ranks do not each compute a share of the samples.
_NOT_SHARED = STRATEGIES.where(lambda one: one.scatters or one.spreads)
_UNEVEN = "with {} ranks do not share the samples evenly; there is no model of that"
_NO_BATCH = "the samples of a step are neither the same on all layouts nor the same for each rank"
_NO_EXCHANGE = (
    "no layout with several ranks is left to fit the exchange to; --bandwidth says its cost"
)
_COMPETES = "more threads than cores: ranks wait for each other's cores"


@dataclass(slots=True)
class Projection:
    """Rows of predicted step times for other numbers of ranks, and the models that predict them."""

    rows: list[Row] = field(default_factory=list)  # one per number of ranks and group of results
    parameters: list[Row] = field(default_factory=list)  # one row per group
    residuals: list[Row] = field(default_factory=list)  # one per measured point
    assumptions: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)  # why a group has no projection

    @property
    def model(self) -> dict[str, Any]:
        """The content of the field `model` of the results file."""
        return {
            "formula": "step = overhead + compute * samples + data * samples + latency * messages "
            "+ bytes / bandwidth",
            "parameters": self.parameters,
            "residuals": self.residuals,
            "assumptions": self.assumptions,
            "refused": self.refused,
        }


def project(rows: Sequence[Row], wanted: Sequence[int], link: Link) -> Projection:
    """Project the step time of each strategy and exchange to other numbers of ranks."""
    done = Projection()
    is_alone = all(one["ranks"] == 1 for one in rows)
    for of in dict.fromkeys(group(one) for one in rows if one["ranks"] > 1 or is_alone):
        _project_group(done, of, [one for one in rows if belongs(one, of)], wanted, link)
    return done


def _project_group(
    done: Projection,
    of: tuple[str | None, str | None],
    members: Sequence[Row],
    wanted: Sequence[int],
    link: Link,
) -> None:
    usable = [one for one in members if one.get("measured_by") == BY_STEPS]
    strategy = next((one["strategy_used"] for one in reversed(usable)), of[0])
    points = [
        Point(
            ranks=one["ranks"],
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
    why = _refusal(strategy, usable, used, batches, cost, link)
    if why is not None or batches is None or cost is None:
        named = "/".join(filter(None, of)) or "the script's own strategy"
        done.refused.append(f"{named}: {why}")
        return
    fitted = fit_model(points, cost, batches)
    model = fitted.over(link)
    names = {"strategy": of[0], "exchange": of[1]}
    done.parameters.append(names | _parameters(model, link))
    done.residuals += [names | _residual(fitted, point) for point in points]
    base = min(usable, key=lambda one: one["ranks"])
    done.rows += [names | _row(model, ranks, base) for ranks in wanted]
    assumed = _assumptions(model, cost, link, used)
    done.assumptions += [line for line in assumed if line not in done.assumptions]


def _cost(usable: Sequence[Row], strategy: str | None) -> Cost | None:
    """Return the messages and bytes of the rows' exchange, from the row with the most ranks."""
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
        sent=(last["ranks"], sent) if several and sent is not None else None,
        gradients=gradients,
    )


def _refusal(
    strategy: str | None,
    usable: Sequence[Row],
    used: Sequence[Point],
    batches: Batches | None,
    cost: Cost | None,
    link: Link,
) -> str | None:
    """Return the reason why no model can be fitted; `None` if one can."""
    alone = all(one.ranks == 1 for one in used)
    checks = [
        (strategy in _NOT_SHARED, _UNEVEN.format(strategy)),
        (not usable, "no steps were measured"),
        (not used, "every layout has more threads than this machine has cores"),
        (batches is None, _NO_BATCH),
        (cost is None, "the bytes that its exchange sends are not recorded"),
        (alone and link.bandwidth is None, _NO_EXCHANGE),
    ]
    return next((why for applies, why in checks if applies), None)


def _residual(model: Model, point: Point) -> Row:
    """Return a point's measured step time, the one that the model predicts, and the relative error."""
    predicted = model.step(point.ranks)
    return {
        "ranks": point.ranks,
        "step_seconds": point.step,
        "predicted_step_seconds": rounded(predicted),
        "error": rounded(predicted / point.step - 1),
        "left_out": point.left_out or None,
    }


def _parameters(model: Model, link: Link) -> Row:
    per_byte = model.parameters.seconds_per_byte
    return {
        **{name: rounded(value) for name, value in asdict(model.parameters).items()},
        "bandwidth_bytes_per_second": rounded(1 / per_byte) if per_byte else None,
        "given": [name for name, value in asdict(link).items() if value is not None],
        "exchange_modelled": model.cost.exchange,
        "shared_bytes": rounded(model.cost.volume),
        "sums": rounded(model.cost.sums),
        "batch": rounded(model.batches.total),
        "batch_per_rank": model.batches.per_rank,
    }


def _row(model: Model, ranks: int, base: Mapping[str, Any]) -> Row:
    gain = model.rate(ranks) / base["samples_per_second"]
    return {
        "ranks": ranks,
        "samples_per_second": rounded(model.rate(ranks)),
        "step_seconds": rounded(model.step(ranks)),
        "speedup": rounded(gain),
        "efficiency": rounded(gain * base["ranks"] / ranks),
        "compute_seconds": rounded(model.compute(ranks)),
        "exchange_seconds": rounded(model.exchange(ranks)),
        "data_seconds": rounded(model.data(ranks)),
    }


def _assumptions(model: Model, cost: Cost, link: Link, used: Sequence[Point]) -> list[str]:
    """Return the assumptions of the model in words."""
    counted, batches = ", ".join(str(one.ranks) for one in used), model.batches
    lines = [
        f"fitted to {counted} ranks, medians of the repeats",
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
    return lines + _on_exchange(model, cost, link, used)


def _on_exchange(model: Model, cost: Cost, link: Link, used: Sequence[Point]) -> list[str]:
    several = [one for one in used if one.ranks > 1]
    by_ring = "a rank sends 2 (N - 1) messages per sum, and 2 (N - 1) / N of the shared bytes"
    by_server = "all ranks send their gradients over the one link of each server"
    lines = [by_server if model.cost.exchange in AT_SERVERS else by_ring]
    if link.bandwidth is None:
        lines.append("what of the exchange is hidden behind the backward pass stays hidden")
    else:
        lines.append("over the given link nothing of the exchange is hidden")
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
