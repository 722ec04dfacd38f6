"""Checks of a model and of the keyword arguments of `run.model`, with the same result on every layout."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lockstep.engine.strategies.model_context import ModelContext
from lockstep.errors import ExactnessError, ModelError
from lockstep.registry import EXCHANGES, STRATEGIES, StrategyEntry, resolve

#: DDP settings that must stay True in an exact run, with the reason.
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


def check(
    module: nn.Module,
    settings: Mapping[str, Any],
    asked: str,
    strategy: StrategyEntry,
    context: ModelContext,
) -> dict[str, Any]:
    """Check a model and the keywords of `run.model`; return the keywords that the strategy's `wrap` takes.

    `settings`: the keywords. `asked`: name of the strategy that the run was configured with, whose checks
    apply on any number of ranks. `strategy`: the strategy that wraps trained models in this run, such as
    `single` on one rank.

    Raises:
        ModelError: for a model that replicas cannot train identically, or an unknown keyword.
        ExactnessError: for a keyword that makes results depend on the number of ranks, if the run
            is exact.
    """
    refuse_unconverted(module)
    if context.replicas > 1:
        refuse_changing(module)
    entry, is_trained = STRATEGIES.find(asked), is_trainable(module)
    of_ddp = taken_by(entry, settings, exact=context.exact, is_trained=is_trained)
    resolve(entry.check)(module, of_ddp, exact=context.exact, device=context.device)
    if strategy.spreads and is_trained:
        return {name: v for name, v in settings.items() if name in strategy.keywords}
    return of_ddp


def taken_by(
    strategy: StrategyEntry, settings: Mapping[str, Any], *, exact: bool, is_trained: bool = True
) -> dict[str, Any]:
    """Return the keywords of `run.model` that the strategy's `check` function gets.

    Keywords of other strategies are left out, so that one script runs with all strategies. `pipeline` and
    `tensor` use the `check` of DDP, so their own keywords are left out, too. Keywords that no strategy has,
    and DDP keywords with a forbidden value, remain: `check` raises an error for them.

    `settings`: the keywords given to `run.model`. `is_trained`: whether the model has trainable parameters.

    Raises:
        ExactnessError: with `exact`, for `mp_policy`, unless the strategy is `fsdp`.
        ModelError: for buffers that are not synchronized, where ranks hold parts of a model.
    """
    own_buffers = named_buffers_of_own(settings)
    if own_buffers and strategy.spreads and is_trained and not exact:  # `exact` refuses it anyway
        raise ModelError(
            f"{own_buffers}=False with strategy={strategy.name}, whose ranks hold parts of one model; "
            "expected buffers that all ranks share",
            hint=f"leave {own_buffers} out, or choose strategy='ddp': there each rank may keep its own",
        )
    others = set(STRATEGIES.keywords().difference(strategy.keywords))
    if exact and "mp_policy" in others and settings.get("mp_policy") is not None:
        raise ExactnessError(
            f"mp_policy with strategy={strategy.name}, which does not know it; with strategy=fsdp the bits "
            "would be others",
            hint="precision='bf16' computes in reduced precision with every strategy",
        )
    if strategy.spreads:
        others.update(strategy.keywords)
    own = {name: value for name, value in settings.items() if name not in others}
    if strategy.ddp_keywords is None:
        return own
    return {
        name: value
        for name, value in own.items()
        if name in strategy.ddp_keywords or not is_harmless(name, own)
    }


# --- keywords of DistributedDataParallel -----------------------------------------------------------


def check_settings(
    module: nn.Module, settings: dict[str, Any], *, exact: bool, device: torch.device
) -> None:
    """Check that DistributedDataParallel can train `module` with the keywords `settings`.

    The check is the same in a run with one rank, which does not use DDP.

    Raises:
        ExactnessError: with `exact`, for a keyword under which the buffers of ranks would differ.
        ModelError: for sparse gradients, or a keyword that DDP does not have or that cannot be
            passed on.
    """
    refuse_sparse(module)
    refuse_unknown(DistributedDataParallel, settings, EXCHANGES.keywords())
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


def refuse_unknown(wrapper: type, settings: dict[str, Any], others: Collection[str] = ()) -> None:
    """Raise a `ModelError` for unknown keywords in `settings`.

    A keyword is known if the class `wrapper` takes it, or if `others` contains it.
    """
    known = [name for name in inspect.signature(wrapper).parameters if name != "module"]
    unknown = [name for name in settings if name not in (*known, *others)]
    if unknown:
        raise ModelError(
            f"{wrapper.__name__} has no setting {', '.join(unknown)}",
            hint=f"its settings are {', '.join(known)}",
        )


def is_harmless(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether the keyword `name` of `run.model` needs no check.

    A keyword of an exchange needs no check. A keyword of DDP needs none if it has DDP's default value, or
    is neither in `REFUSED` nor in `INEXACT`.
    """
    if name in EXCHANGES.keywords():
        return True
    known = inspect.signature(DistributedDataParallel).parameters
    return name in known and (name not in (*REFUSED, *INEXACT) or _is_default(name, settings))


def _is_default(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether the keyword `name` is missing in `settings`, or has DDP's default value.

    Values are compared by `is`, since a value may be a tensor.
    """
    value = settings.get(name)
    return value is None or value is (name in INEXACT)


def _check_devices(settings: dict[str, Any], device: torch.device) -> None:
    """Raise a `ModelError` if `device_ids` is not this rank's GPU, or is given in a run on the CPU."""
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
    """Return the index of a device; `device`: an index, a name such as "cuda:1", or a `torch.device`."""
    return device if isinstance(device, int) else torch.device(device).index


def shares_buffers(settings: Mapping[str, Any]) -> bool:
    """Whether buffers are synchronized over ranks: true unless the keywords `settings` switch it off.

    DDP's keywords for this are `broadcast_buffers` and, in newer versions of torch, `forward_sync_buffers`.
    """
    return named_buffers_of_own(settings) is None


def named_buffers_of_own(settings: Mapping[str, Any]) -> str | None:
    """Return the name of the DDP keyword by which `settings` switch synchronization of buffers off.

    The result is `None` if buffers are synchronized.
    """
    # As in DDP, the older name has no effect if the newer name is given.
    newer = "forward_sync_buffers"
    name = "broadcast_buffers" if settings.get(newer) is None else newer
    return name if settings.get(name) is False else None


# --- models ----------------------------------------------------------------------------------------


def refuse_sparse(module: nn.Module) -> None:
    """Raise a `ModelError` if an embedding has sparse gradients, which are added in no fixed order."""
    for name, child in module.named_modules():
        if isinstance(child, nn.Embedding | nn.EmbeddingBag) and child.sparse:
            raise ModelError(
                f"the embedding {name or type(child).__name__} has sparse=True; "
                "expected dense gradients",
                hint="create it with sparse=False",
            )


def refuse_unconverted(module: nn.Module) -> None:
    """Raise a `ModelError` if a layer is PyTorch's SyncBatchNorm, which `run.sync_batchnorm` replaces."""
    for name, child in module.named_modules():
        if isinstance(child, nn.SyncBatchNorm):
            raise ModelError(
                f"the layer {name or '(the model itself)'} is PyTorch's SyncBatchNorm, which runs on GPUs "
                "only and counts samples that stand in for none; expected Lockstep's",
                hint="model = run.model(run.sync_batchnorm(model)) converts it",
            )


def refuse_changing(module: nn.Module) -> None:
    """Raise a `ModelError` for a layer whose forward pass changes or creates parameters.

    Such layers are embeddings with `max_norm`, and lazy modules that were not called yet.
    """
    for name, part in module.named_modules():
        what = f"the layer {name or '(the model itself)'}, a {type(part).__name__},"
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            raise ModelError(
                f"{what} has max_norm={part.max_norm}, which changes its weights in each forward pass; "
                "expected None, since replicas on one rank would change them one after the other",
                hint="scale in forward: v * (max_norm / v.norm(dim=-1, keepdim=True)).clamp(max=1); or "
                "renormalise weights between the batches of run.batches(…)",
            )
        if any(map(nn.parameter.is_lazy, (*part._parameters.values(), *part._buffers.values()))):
            raise ModelError(
                f"{what} has parameters without a shape yet; expected a model that has been called",
                hint="call the model once, on a batch of zeros, before run.model(model)",
            )


def check_same_models(
    module: nn.Module, name: str, store: dist.Store, rank: int, size: int
) -> None:
    """Raise a `ModelError` if the names, shapes or dtypes of this rank's parameters differ from rank 0's.

    With different models DDP would hang. `name`: key of this model in the store. `size`: number of ranks.
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
        f"rank {rank} of {size} built a different {type(module).__name__} than rank 0: "
        f"{differing[0]}; rank 0 has {differing[1]}",
        hint="build the model from the same arguments on every rank, never from the rank",
    )


def _describe(parameter: torch.Tensor) -> str:
    """Return text with the shape and dtype of a parameter, and its strides if it is not contiguous."""
    text = f"{tuple(parameter.shape)} {parameter.dtype}"
    return text if parameter.is_contiguous() else f"{text}, strides {parameter.stride()}"


def is_trainable(module: nn.Module) -> bool:
    """Return whether any parameter of a module has `requires_grad`."""
    return any(parameter.requires_grad for parameter in module.parameters())


def spans_devices(module: nn.Module) -> bool:
    """Return whether `module` has parameters or buffers on several GPUs.

    DDP accepts no `device_ids` for such a module.
    """
    places = {t.device for t in (*module.parameters(), *module.buffers())}
    return len({place for place in places if place.type != "cpu"}) > 1


def as_module(model: Any) -> nn.Module:
    """Return `model` if it is a module, or an `nn.Sequential` of its items if it is a list of modules.

    Other types raise a `ModelError`.
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
