"""Classes of exactness (see `lockstep.registry`): which of them a run is in."""

from __future__ import annotations

from collections.abc import Iterable

EXACTNESS = ("exact", "close", "approximate")
PRECISIONS = ("fp32", "bf16", "fp16")


def of_servers(strategy: str, staleness: int | None, device: str) -> str:
    """Return the class of a run by where it updates: servers do, on the CPU, with `ps` and a staleness."""
    updates = strategy == "ps" and staleness is not None
    return "close" if updates and device != "cpu" else "exact"


def worst(classes: Iterable[str]) -> str:
    """Return the class of a run whose parts are in `classes`."""
    return max(classes, key=EXACTNESS.index, default="exact")
