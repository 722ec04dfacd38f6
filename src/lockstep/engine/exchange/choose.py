"""Choice of the exchange of a run: the method that sums gradients over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from lockstep.engine.exchange.base import Exchange, ExchangeContext, Forest
from lockstep.errors import ExactnessError, UsageError
from lockstep.registry import EXCHANGES, StrategyEntry, resolve


def check_exchange(strategy: StrategyEntry, name: str) -> None:
    """Raise `UsageError` if the strategy does not work with the exchange (sum of gradients) `name`."""
    exchange = EXCHANGES.find(name)
    if name != "auto" and strategy.exchanges is not None and name not in strategy.exchanges:
        raise UsageError(
            f"exchange={name} with strategy={strategy.name}, {strategy.why}; expected auto, "
            f"{', '.join(strategy.exchanges)}",
            hint="leave the exchange to 'auto', or choose strategy='ddp'",
        )
    if exchange.strategy not in (None, strategy.name):
        raise UsageError(
            f"exchange={name} with strategy={strategy.name}; expected strategy={exchange.strategy}",
            hint=f"--strategy {exchange.strategy}, or leave the exchange to 'auto'",
        )


def choose_exchange(
    strategy: StrategyEntry,
    wanted: str,
    forest: Forest,
    *,
    precision: str = "fp32",
    one_host: bool,
    device: str,
    exact: bool,
) -> str:
    """Return the name of the exchange to use: `wanted`, or the fastest exact one for `auto`.

    Args:
        strategy: strategy of the run; if it works with one exchange only, this one is returned.
        wanted: name of an exchange, or `auto`.
        forest: order of additions over the ranks of the run.
        precision: precision of the run, such as `fp16`, whose loss scale some exchanges cannot work with.
        one_host: whether all ranks are on one host.
        device: type of the ranks' devices, such as `cpu`.
        exact: whether to refuse an exchange whose sums depend on the layout.

    Raises:
        UsageError: if the exchange does not exist, or does not work with this precision, on this
            device or over several hosts.
        WorldError: for `mpi` if MPI is missing, or has a different number of processes than the
            run.
        ExactnessError: if `exact` is true and the sums of the exchange depend on the layout.
    """
    reasons = {
        f"strategy={strategy.name}": strategy.no_loss_scale,
        f"exchange={wanted}": EXCHANGES.find(wanted).no_loss_scale,
    }
    for asked, why in reasons.items():
        if precision == "fp16" and why:
            raise UsageError(
                f"precision=fp16 with {asked}: {why}",
                hint="precision='bf16', which needs no loss scale",
            )
    if strategy.exchanges is not None and len(strategy.exchanges) == 1:
        return strategy.exchanges[0]
    if wanted == "auto":
        if one_host and device == "cpu":
            return "shared-memory"
        return "native" if exactness_of("native", forest) == "exact" else "tree"
    entry = EXCHANGES.find(wanted)
    if exact and entry.exactness == "approximate":
        raise ExactnessError(
            f"exchange={wanted} trains by other sums than one process does; "
            "expected an exchange that adds the gradients as they are",
            hint="exchange='auto', or say exact=False to the run (lockstep run --no-exact)",
        )
    if entry.check:
        resolve(entry.check)(forest, one_host=one_host, device=device)
    if exact and exactness_of(wanted, forest) != "exact":
        raise ExactnessError(
            f"exchange={wanted} with {forest.size} ranks sums in an order of its own; "
            "expected an exchange that sums in tree order",
            hint="exchange='tree' or 'shared-memory', or say exact=False to the run",
        )
    return wanted


def exactness_of(name: str, forest: Forest) -> str:
    """Return the exactness class of the exchange `name`: `exact`, `close` or `approximate`.

    The class can depend on the number of partial sums in `forest`. `name` may be `none`, for no exchange.
    """
    if name == "none":
        return "exact"
    entry = EXCHANGES.find(name)
    is_exact = entry.is_exact and resolve(entry.is_exact)(forest)
    return "exact" if is_exact else entry.exactness


def make(context: ExchangeContext) -> Exchange:
    """Return a new exchange, as `context` describes it; settings of other exchanges are ignored.

    Raises:
        ModelError: if the exchange refuses a setting.
        UsageError: for the exchange `server`, whose sums are computed by parameter servers.
    """
    entry = EXCHANGES.find(context.name)
    if not entry.build:
        raise UsageError(
            f"exchange={context.name} makes no sums of gradients; expected an exchange that does",
            hint="leave the exchange to 'auto'",
        )
    own = {key: value for key, value in context.settings.items() if key in entry.keywords}
    return cast("Exchange", resolve(entry.build)(replace(context, settings=own)))
