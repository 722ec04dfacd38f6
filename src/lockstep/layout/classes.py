"""Classes of exactness (see `lockstep.registry`): which of them a run is in."""

from __future__ import annotations

from collections.abc import Iterable

EXACTNESS = ("exact", "close", "approximate")
PRECISIONS = ("fp32", "bf16", "fp16")


def of_staleness(staleness: int | None, device: str) -> str:
    """Return the class of a run whose servers update, on the CPU, with a staleness; of others `exact`."""
    if staleness:
        return "approximate"
    return "exact" if staleness is None or device == "cpu" else "close"


def worst(classes: Iterable[str]) -> str:
    """Return the class of a run whose parts are in `classes`."""
    return max(classes, key=EXACTNESS.index, default="exact")
