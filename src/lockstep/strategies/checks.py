"""What a model and its settings must be, whatever the strategy and the layout."""

from __future__ import annotations

import inspect
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.errors import ExactnessError, ModelError

#: DDP settings under which its sums escape the exchange, and why.
INEXACT = {
    "broadcast_buffers": "each rank would keep running statistics of its own",
    "forward_sync_buffers": "each rank would keep running statistics of its own",
    "mixed_precision": "gradients would be summed in reduced precision",
    "delay_all_reduce_named_params": "these parameters bypass the exchange",
    "param_to_hook_all_reduce": "these parameters bypass the exchange",
    "process_group": "the exchange works in the run's own group",
    "device_mesh": "the exchange works in the run's own group",
}


def check_settings(module: nn.Module, settings: dict[str, Any], *, exact: bool) -> None:
    """Refuse what DDP cannot do, and with `exact` what would break the promise.

    Raises:
        ExactnessError: for a setting under which sums escape the exchange.
        ModelError: for sparse gradients, or a setting that DDP does not have.
    """
    refuse_sparse(module)
    known = inspect.signature(DistributedDataParallel).parameters
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise ModelError(
            f"DistributedDataParallel has no setting {', '.join(unknown)}",
            hint=f"its settings are {', '.join(name for name in known if name != 'module')}",
        )
    for name, reason in INEXACT.items() if exact else ():
        if breaks_promise({name: settings.get(name)}):
            raise ExactnessError(
                f"{name}={settings[name]!r} would break the promise: {reason}",
                hint=f"leave out {name}, or say exact=False to the run",
            )


def shares_buffers(settings: dict[str, Any]) -> bool:
    """Whether ranks take replica 0's buffers: always, but for who asked otherwise with exact=False."""
    return False not in (settings.get("broadcast_buffers"), settings.get("forward_sync_buffers"))


def breaks_promise(settings: dict[str, Any]) -> bool:
    """Whether a setting would be refused with exact=True."""
    return any(
        name in settings and settings[name] not in (None, name.endswith("buffers"))
        for name in INEXACT
    )


def refuse_sparse(module: nn.Module) -> None:
    """Refuse sparse gradients, which no exchange sums in a fixed order.

    Raises:
        ModelError: if an embedding of `module` has `sparse=True`.
    """
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ModelError(
                f"the embedding {name or type(child).__name__} has sparse=True; "
                "expected dense gradients",
                hint="create it with sparse=False",
            )


def check_same_models(
    module: nn.Module, name: str, store: dist.Store, rank: int, size: int
) -> None:
    """Refuse ranks that build different models, before DDP would hang or fail on them.

    Raises:
        ModelError: naming the first parameter that differs from rank 0's.
    """
    own = [f"{key}: {tuple(p.shape)} {p.dtype}" for key, p in module.named_parameters()]
    key = f"model/{name}"
    if rank == 0:
        store.set(key, "\n".join(own))
    theirs = store.get(key).decode().split("\n")
    if own == theirs:
        return
    differing = next(
        ((a, b) for a, b in zip(own, theirs, strict=False) if a != b),
        (f"{len(own)} parameters", f"{len(theirs)} parameters"),
    )
    raise ModelError(
        f"rank {rank} of {size} built another {type(module).__name__} than rank 0: "
        f"{differing[0]}; rank 0 has {differing[1]}",
        hint="build the model from the same arguments on every rank, never from the rank",
    )
