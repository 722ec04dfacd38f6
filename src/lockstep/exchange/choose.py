"""Which exchange a run uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.errors import ExactnessError, UsageError
from lockstep.exchange.base import Exchange, Forest
from lockstep.exchange.compressed import HalfExchange
from lockstep.exchange.mpi import check_usable, make_mpi
from lockstep.exchange.native import NativeExchange
from lockstep.exchange.shared_memory import SharedMemoryExchange
from lockstep.exchange.tree import GroupWire, TreeExchange
from lockstep.layout.classes import APPROXIMATE_EXCHANGES

_NOTES = 256  # bytes
_HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
#: Keywords that `run.model` takes for `powersgd`: those of PyTorch's PowerSGDState.
POWERSGD_KEYWORDS = (
    *("matrix_approximation_rank", "start_powerSGD_iter", "min_compression_rate"),
    *("use_error_feedback", "warm_start", "orthogonalization_epsilon", "random_seed"),
    *("compression_stats_logging_frequency", "batch_tensors_with_same_shape"),
)


def choose_name(wanted: str, forest: Forest, *, one_host: bool, device: str, exact: bool) -> str:
    """Return the name of the exchange to use; `auto` is the fastest exact one.

    Raises:
        UsageError: for an exchange that cannot work here.
        WorldError: for `mpi` where MPI is not there, or counts other processes than the run.
        ExactnessError: for one whose sums depend on the layout, with `exact`.
    """
    if exact and wanted in APPROXIMATE_EXCHANGES:
        raise ExactnessError(
            f"exchange={wanted} trains by other sums than one process does; "
            "expected an exchange that adds the gradients as they are",
            hint="exchange='auto', or say exact=False to the run (lockstep run --no-exact)",
        )
    shares_memory = one_host and device == "cpu"
    if wanted == "auto":
        if shares_memory:
            return "shared-memory"
        return "native" if NativeExchange.is_exact(forest) else "tree"
    if wanted == "shared-memory" and not shares_memory:
        raise UsageError(
            f"exchange=shared-memory with {'ranks on several hosts' if not one_host else device}; "
            "expected ranks on the CPUs of one host",
            hint="exchange='tree' works everywhere",
        )
    if wanted == "mpi":
        check_usable(forest, device)
    if wanted == "native" and exact and not NativeExchange.is_exact(forest):
        raise ExactnessError(
            f"exchange=native with {forest.size} ranks sums in an order of its own; "
            "expected an exchange that sums in tree order",
            hint="exchange='tree' or 'shared-memory', or say exact=False to the run",
        )
    return wanted


def choose_scatter(wanted: str) -> str:
    """Return how gradients meet where each rank needs the sums of its own part only.

    Raises:
        UsageError: for an exchange that gives every rank all sums.
    """
    if wanted not in ("auto", "tree"):
        raise UsageError(
            f"exchange={wanted} with strategy=fsdp, where each rank takes its own part of the sums; "
            "expected the exchange tree",
            hint="leave the exchange to 'auto', or choose strategy='ddp'",
        )
    return "tree"


def exactness_of(name: str, forest: Forest) -> str:
    """Return the class of a run that uses an exchange."""
    if name in APPROXIMATE_EXCHANGES:
        return "approximate"
    return "close" if name == "native" and not NativeExchange.is_exact(forest) else "exact"


def make(
    name: str,
    forest: Forest,
    parameters: Sequence[torch.Tensor],
    *,
    group: dist.ProcessGroup,
    store: dist.Store,
    key: str,
    settings: Mapping[str, Any] | None = None,
) -> Exchange:
    """Return a new exchange for the gradients of `parameters`.

    Args:
        name: of the exchange.
        forest: the tree nodes of the ranks.
        parameters: of the model.
        group: the ranks.
        store: where they leave notes for each other.
        key: used once per run.
        settings: the user's, of which the exchange takes its own.

    Raises:
        ModelError: for settings that it refuses.
    """
    if name == "native":
        return NativeExchange(group, forest)
    if name == "tree":
        return TreeExchange(GroupWire(group), forest)
    if name == "mpi":
        return make_mpi(forest, parameters)
    if name in _HALVES:
        return HalfExchange(GroupWire(group), forest, _HALVES[name], name)
    if name == "powersgd":
        # Seldom needed, and it takes its time to import.
        from lockstep.exchange.powersgd import PowerSGDExchange

        own = {key: value for key, value in (settings or {}).items() if key in POWERSGD_KEYWORDS}
        return PowerSGDExchange(group, forest, own)
    # Behind the last bucket the strategy writes notes: an element per parameter, and a few more.
    capacity = sum(_bytes(parameter) + parameter.element_size() for parameter in parameters)
    capacity += _NOTES
    return SharedMemoryExchange(store, key, forest, capacity=capacity, buckets=len(parameters) + 1)


def _bytes(parameter: torch.Tensor) -> int:
    return parameter.numel() * parameter.element_size()
