"""Models that a script prunes while it trains: their masks come back with their state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.utils import prune


def unpruned(module: nn.Module, state: Mapping[str, Any]) -> list[str]:
    """Return the parameters of `module` that are pruned in `state`, a `state_dict`, and not yet here."""
    masked = [name.removesuffix("_mask") for name in state if name.endswith("_mask")]
    own = dict(module.named_parameters()) if masked else {}
    return [name for name in masked if name in own and f"{name}_orig" in state]


def prune_alike(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Prune what is pruned in `state`."""
    for name in unpruned(module, state):
        part, _, own = name.rpartition(".")
        prune.custom_from_mask(module.get_submodule(part), own, state[f"{name}_mask"])  # type: ignore[no-untyped-call]
