"""Exactness classes of a run: `exact` (same bits on any number of ranks), `close`, `approximate`."""

from __future__ import annotations

from collections.abc import Iterable

from lockstep.registry import STRATEGIES

#: Classes of exactness, from the best to the worst.
EXACTNESS = ("exact", "close", "approximate")
PRECISIONS = ("fp32", "bf16", "fp16")


def of_servers(strategy: str, staleness: int | None, device: str) -> str:
    """Return `close` if parameter servers run the optimizer for ranks on GPUs, else `exact`.

    Servers compute on CPUs, which round differently from GPUs. They run the optimizer if `strategy` has
    servers and `staleness` is not `None`.
    """
    return "close" if updates_in_servers(strategy, staleness) and device != "cpu" else "exact"


def updates_in_servers(strategy: str, staleness: int | None) -> bool:
    """Return whether parameter servers run the optimizer; if so, no rank has whole gradients."""
    return STRATEGIES.find(strategy).has_servers and staleness is not None


def worst(classes: Iterable[str]) -> str:
    """Return the least exact of the exactness classes `classes`; `exact` if there are none."""
    return max(classes, key=EXACTNESS.index, default="exact")
