"""Strategies that hold one model over several ranks, and what `run.model` takes for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lockstep.errors import UsageError
from lockstep.strategies.held import HeldModel
from lockstep.strategies.holding import Holding

#: What they take besides the model; other strategies ignore it, so that one script serves all.
_OWN = ("chunks", "split", "plan")
#: Exchanges that sum what one column of ranks has, apart from the other columns.
_EXCHANGES = ("shared-memory", "tree", "native")


def take(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the settings for strategies that spread a model, and the rest."""
    own = {name: value for name, value in settings.items() if name in _OWN}
    return own, {name: value for name, value in settings.items() if name not in _OWN}


def hold(
    strategy: str, module: nn.Module, holding: Holding, settings: Mapping[str, Any]
) -> HeldModel:
    """Hold `module` over the ranks of a row.

    Raises:
        UsageError: if ranks, settings or exchange don't go together.
        ModelError: if the model cannot be spread so.
        ExactnessError: for what breaks the promise.
    """
    if holding.exchange not in _EXCHANGES:
        raise UsageError(
            f"exchange={holding.exchange} with strategy={strategy}; expected one of "
            f"{', '.join(_EXCHANGES)}, which serve the ranks that hold one part of a model",
            hint="leave the exchange to 'auto'",
        )
    # Half a second of imports each, which other strategies do without.
    if strategy == "pipeline":
        from lockstep.strategies.pipeline import hold_pipelined

        return hold_pipelined(module, holding, settings)
    from lockstep.strategies.tensor import hold_tensors

    return hold_tensors(module, holding, settings)
