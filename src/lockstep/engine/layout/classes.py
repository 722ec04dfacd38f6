"""Classes of exactness of a run: `exact`, `close`, `approximate` (see `lockstep.registry`)."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.registry import STRATEGIES

#: Classes of exactness, from the best to the worst.
EXACTNESS = ("exact", "close", "approximate")
PRECISIONS = ("fp32", "bf16", "fp16")


def of_servers(strategy: str, staleness: int | None, device: str) -> str:
    """Return `close` if servers run the optimizer, on their CPUs, for ranks on GPUs; else `exact`."""
    return "close" if updates_in_servers(strategy, staleness) and device != "cpu" else "exact"


def updates_in_servers(strategy: str, staleness: int | None) -> bool:
    """Return whether parameter servers run the optimizer, so that no rank has whole gradients."""
    return STRATEGIES.find(strategy).has_servers and staleness is not None


def worst(classes: Iterable[str]) -> str:
    """Return the worst of some classes of exactness, which is the class of a run with these parts."""
    return max(classes, key=EXACTNESS.index, default="exact")
