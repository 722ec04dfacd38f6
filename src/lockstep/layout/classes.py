"""What a run may be asked for by name, and the class of exactness that it is in then.

`exact`: the bits of the result do not depend on the layout. `close`: the same mathematics, rounded in
another order. `approximate`: other mathematics, to the same end.
"""

from __future__ import annotations

from collections.abc import Iterable

EXACTNESS = ("exact", "close", "approximate")
STRATEGIES = ("auto", "single", "ddp", "dp", "ps", "fsdp", "pipeline", "tensor")
EXCHANGES = (
    "auto",
    "shared-memory",
    "tree",
    "native",
    "mpi",
    "server",
    "bf16",
    "fp16",
    "powersgd",
    "local-sgd",
    "diloco",
)
PRECISIONS = ("fp32", "bf16", "fp16")

#: Exchanges that change what is summed, or when.
APPROXIMATE_EXCHANGES = ("bf16", "fp16", "powersgd", "local-sgd", "diloco")
#: Those whose ranks train by themselves for some steps at a time.
LOCAL_EXCHANGES = ("local-sgd", "diloco")


def of_staleness(staleness: int | None, device: str) -> str:
    """Return the class of a run whose servers update, on the CPU, with a staleness; of others `exact`."""
    if staleness:
        return "approximate"
    return "exact" if staleness is None or device == "cpu" else "close"


def worst(classes: Iterable[str]) -> str:
    """Return the class of a run whose parts are in `classes`."""
    return max(classes, key=EXACTNESS.index, default="exact")
