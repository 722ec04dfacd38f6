"""Choice of the exchange of a run: the method that sums gradients over ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch

from lockstep.engine.exchange.base import Exchange, ExchangeContext, Forest
from lockstep.errors import ExactnessError, UsageError
from lockstep.registry import EXCHANGES, resolve


def choose_name(wanted: str, forest: Forest, *, one_host: bool, device: str, exact: bool) -> str:
    """Return the name of the exchange to use: `wanted`, or the fastest exact one for `auto`.

    Raises:
        UsageError: for an exchange that does not exist, or that does not work with these ranks.
        WorldError: for `mpi` if MPI is missing, or has a different number of processes than the run.
        ExactnessError: if `exact` is true and the sums of the exchange depend on the layout.
    """
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
    """Return `exact`, `close` or `approximate` for the exchange `name`; `none` stands for no exchange."""
    if name == "none":
        return "exact"
    entry = EXCHANGES.find(name)
    is_exact = entry.is_exact and resolve(entry.is_exact)(forest)
    return "exact" if is_exact else entry.exactness


def make(
    name: str,
    forest: Forest,
    parameters: Sequence[torch.Tensor],
    settings: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> Exchange:
    """Return a new exchange for the gradients of `parameters`.

    `more` has the other attributes of `ExchangeContext`.

    Raises:
        ModelError: if the exchange refuses a setting.
        UsageError: for the exchange `server`, whose sums are computed by parameter servers.
    """
    entry = EXCHANGES.find(name)
    if not entry.build:
        raise UsageError(
            f"exchange={name} makes no sums of gradients; expected an exchange that does",
            hint="leave the exchange to 'auto'",
        )
    own = {key: value for key, value in settings.items() if key in entry.keywords}
    context = ExchangeContext(name=name, forest=forest, parameters=parameters, settings=own, **more)
    return cast("Exchange", resolve(entry.build)(context))
