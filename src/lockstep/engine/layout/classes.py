"""Class of exactness of a run (see `lockstep.registry`)."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.registry import STRATEGIES

EXACTNESS = ("exact", "close", "approximate")
PRECISIONS = ("fp32", "bf16", "fp16")


def of_servers(strategy: str, staleness: int | None, device: str) -> str:
    """Return the class of a run by its updates: with a staleness servers make them, on the CPU."""
    return "close" if updates_in_servers(strategy, staleness) and device != "cpu" else "exact"


def updates_in_servers(strategy: str, staleness: int | None) -> bool:
    """Whether servers have the parameters, and no rank has whole gradients."""
    return STRATEGIES.find(strategy).has_servers and staleness is not None


def worst(classes: Iterable[str]) -> str:
    """Return the class of a run whose parts are in `classes`."""
    return max(classes, key=EXACTNESS.index, default="exact")
