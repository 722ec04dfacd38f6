"""Checks of a model and its settings that hold for every strategy and layout."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.errors import ExactnessError, ModelError
from lockstep.exchange.choose import POWERSGD_KEYWORDS

#: DDP settings under which ranks keep something of their own, and what.
INEXACT = {
    "broadcast_buffers": "each rank would keep running statistics of its own",
    "forward_sync_buffers": "each rank would keep running statistics of its own",
}
_DELAYED = "DDP would average these gradients by itself, which are weighted by samples here and only summed"
_GROUP = "the exchange works in the groups that the run makes of its ranks"
#: DDP settings that cannot be passed on, the reason, and what to do instead.
REFUSED = {
    "process_group": (_GROUP, "start as many ranks as the model is to have"),
    "device_mesh": (_GROUP, "strategy='pipeline' or 'tensor' with a mesh takes several dimensions"),
    "delay_all_reduce_named_params": (
        _DELAYED,
        "leave it out; bucket_cap_mb decides when sums start",
    ),
    "param_to_hook_all_reduce": (_DELAYED, "leave it out; bucket_cap_mb decides when sums start"),
    "mixed_precision": (
        "it takes the communication hook, which is the exchange's",
        "precision='bf16' computes in reduced precision, exchange='bf16' sums in it",
    ),
    "skip_all_reduce_unused_params": (
        "each rank would decide by itself what it does not sum, and wait for ranks that decide otherwise",
        "leave it out; parameters that no replica uses are found, and left without a gradient",
    ),
}


def check_settings(
    module: nn.Module, settings: dict[str, Any], *, exact: bool, device: torch.device
) -> None:
    """Refuse what DDP cannot do, and with `exact` what would break the promise.

    On a single rank, too, where DDP is not used: a script means the same on every layout.

    Raises:
        ExactnessError: for a setting under which ranks would differ.
        ModelError: for sparse gradients, or a setting that DDP does not have or that cannot be passed on.
    """
    refuse_sparse(module)
    refuse_unknown(DistributedDataParallel, settings, POWERSGD_KEYWORDS)
    for name, (reason, hint) in REFUSED.items():
        if not _is_default(name, settings):
            raise ModelError(f"{name} cannot be passed on to DDP: {reason}", hint=hint)
    _check_devices(settings, device)
    for name, reason in INEXACT.items() if exact else ():
        if not _is_default(name, settings):
            raise ExactnessError(
                f"{name}={settings[name]!r} would break the promise: {reason}",
                hint=f"leave out {name}, or say exact=False to the run",
            )


def refuse_unknown(wrapper: type, settings: dict[str, Any], others: Sequence[str] = ()) -> None:
    """Refuse keywords that a wrapper of PyTorch does not have, and that are none of `others`.

    Raises:
        ModelError: naming them, and those that it has.
    """
    known = [name for name in inspect.signature(wrapper).parameters if name != "module"]
    unknown = [name for name in settings if name not in (*known, *others)]
    if unknown:
        raise ModelError(
            f"{wrapper.__name__} has no setting {', '.join(unknown)}",
            hint=f"its settings are {', '.join(known)}",
        )


def is_harmless(name: str, settings: dict[str, Any]) -> bool:
    """Whether a setting is DDP's, or an exchange's, and changes no result and nothing that is refused."""
    if name in POWERSGD_KEYWORDS:
        return True
    known = inspect.signature(DistributedDataParallel).parameters
    return name in known and (name not in (*REFUSED, *INEXACT) or _is_default(name, settings))


def _is_default(name: str, settings: dict[str, Any]) -> bool:
    """Whether a setting says what holds without it. By identity: a value may be a tensor."""
    value = settings.get(name)
    return value is None or value is (name in INEXACT)


def _check_devices(settings: dict[str, Any], device: torch.device) -> None:
    """Refuse devices besides the one that the rank computes on, and any on the processor, as DDP does."""
    ids = [index_of(one) for one in settings.get("device_ids") or ()]
    if device.type == "cpu":
        given = [
            name for name in ("device_ids", "output_device") if settings.get(name) not in (None, [])
        ]
        if given:
            raise ModelError(
                f"{given[0]}={settings[given[0]]!r}, and the run computes on the CPU; expected none",
                hint=f"leave {given[0]} out: --devices says what a run computes on",
            )
    elif ids not in ([], [device.index]):
        raise ModelError(
            f"device_ids={settings['device_ids']!r}, and this rank computes on {device}; "
            f"expected [{device.index}]",
            hint="leave device_ids out: --devices says what each rank computes on",
        )


def index_of(device: int | str | torch.device) -> int | None:
    """Return the number of a device, however it is given."""
    return device if isinstance(device, int) else torch.device(device).index


def shares_buffers(settings: dict[str, Any]) -> bool:
    """Whether ranks take replica 0's buffers: always, unless settings say otherwise with exact=False."""
    return named_buffers_of_own(settings) is None


def named_buffers_of_own(settings: dict[str, Any]) -> str | None:
    """Return the setting that asks for buffers of each rank's own; `None` if there is none."""
    # The older name is not read beside the newer one, as in DDP.
    newer = "forward_sync_buffers"
    name = "broadcast_buffers" if settings.get(newer) is None else newer
    return name if settings.get(name) is False else None


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


def refuse_unconverted(module: nn.Module) -> None:
    """Refuse PyTorch's own SyncBatchNorm.

    Raises:
        ModelError: if a layer of `module` is one.
    """
    for name, child in module.named_modules():
        if isinstance(child, nn.SyncBatchNorm):
            raise ModelError(
                f"the layer {name or '(the model itself)'} is PyTorch's SyncBatchNorm, which runs on GPUs "
                "only and counts samples that stand in for none; expected Lockstep's",
                hint="model = run.model(run.sync_batchnorm(model)) converts it",
            )


def check_same_models(
    module: nn.Module, name: str, store: dist.Store, rank: int, size: int
) -> None:
    """Refuse ranks that build different models, before DDP would hang or fail on them.

    Raises:
        ModelError: naming the first parameter that differs from rank 0's.
    """
    own = [f"{key}: {_describe(p)}" for key, p in module.named_parameters()]
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


def _describe(parameter: torch.Tensor) -> str:
    """Return shape and type, and the order in memory where it is not that of the indices: sums go by it."""
    told = f"{tuple(parameter.shape)} {parameter.dtype}"
    return told if parameter.is_contiguous() else f"{told}, strides {parameter.stride()}"


def as_module(model: Any) -> nn.Module:
    """Return a list of modules as one, and a module as it is.

    Raises:
        ModelError: for anything else.
    """
    if isinstance(model, nn.Module):
        return model
    if not isinstance(model, list | tuple) or not model:
        raise ModelError(
            f"run.model was given a {type(model).__name__}; expected a Module or a list of Modules"
        )
    for place, part in enumerate(model):
        if not isinstance(part, nn.Module):
            raise ModelError(
                f"entry {place} of the list given to run.model is a {type(part).__name__}; "
                "expected a Module"
            )
    return nn.Sequential(*model)
