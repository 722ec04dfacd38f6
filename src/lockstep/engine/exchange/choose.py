"""Choice of the exchange of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lockstep.engine.exchange.base import Exchange, ExchangeContext, Forest
from lockstep.errors import ExactnessError, UsageError
from lockstep.registry import EXCHANGES, resolve

#: Keywords that `run.model` takes for `powersgd`: those of PyTorch's PowerSGDState.
POWERSGD_KEYWORDS = (
    *("matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate"),
    *("use_error_feedback", "warm_start", "orthogonalization_epsilon", "random_seed"),
    *("compression_stats_logging_frequency", "batch_tensors_with_same_shape"),
)


def choose_name(wanted: str, forest: Forest, *, one_host: bool, device: str, exact: bool) -> str:
    """Return the name of the exchange to use; `auto` is the fastest exact one.

    Raises:
        UsageError: for an exchange that cannot work here, or that is none.
        WorldError: for `mpi` where MPI is not there, or counts other processes than the run.
        ExactnessError: for one whose sums depend on the layout, with `exact`.
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
    """Return the class of a run that uses an exchange; `none` is that of a rank by itself."""
    if name == "none":
        return "exact"
    entry = EXCHANGES.find(name)
    is_exact = entry.is_exact and resolve(entry.is_exact)(forest)
    return "exact" if is_exact else entry.exactness


def make(name: str, forest: Forest, parameters: Sequence[torch.Tensor], **more: Any) -> Exchange:
    """Return a new exchange for the gradients of `parameters`.

    Args:
        name: of the exchange.
        forest: the tree nodes of the ranks.
        parameters: of the model.
        more: the other attributes of `ExchangeContext`.

    Raises:
        ModelError: for settings that it refuses.
        UsageError: for an exchange that is not for strategies which sum gradients.
    """
    entry = EXCHANGES.find(name)
    if not entry.build:
        raise UsageError(
            f"exchange={name} makes no sums of gradients; expected an exchange that does",
            hint="leave the exchange to 'auto'",
        )
    context = ExchangeContext(name=name, forest=forest, parameters=parameters, **more)
    made: Exchange = resolve(entry.build)(context)
    return made
