"""Classes of exactness of a run: `exact`, `close`, `approximate` (see `lockstep.registry`)."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.registry import STRATEGIES

#: Classes of exactness, from the best to the worst.
EXACTNESS = ("exact", "close", "approximate")
PRECISIONS = ("fp32", "bf16", "fp16")


def of_servers(strategy: str, staleness: int | None, device: str) -> str:
    """Return the exactness class of parameter servers: `close` if they update for GPUs, else `exact`.

    Servers run the optimizer on CPUs, which round otherwise than the GPUs of the ranks.
    """
    return "close" if updates_in_servers(strategy, staleness) and device != "cpu" else "exact"


def updates_in_servers(strategy: str, staleness: int | None) -> bool:
    """Return whether parameter servers run the optimizer, in which case no rank has whole gradients."""
    return STRATEGIES.find(strategy).has_servers and staleness is not None


def worst(classes: Iterable[str]) -> str:
    """Return the least exact of `classes`, as for a run whose parts have these exactness classes."""
    return max(classes, key=EXACTNESS.index, default="exact")
