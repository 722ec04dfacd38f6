"""Checks of a model and of the keyword arguments of `run.model`, on every layout."""

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


def check(
    module: nn.Module,
    settings: Mapping[str, Any],
    asked: str,
    strategy: StrategyEntry,
    context: ModelContext,
) -> dict[str, Any]:
    """Check a model and the keywords of `run.model`; return those for the strategy that wraps it.

    `asked`: name of the strategy that the run asks for, whose checks apply on every layout. `strategy`:
    the one that wraps trained models here.

    Raises:
        ModelError: for a model that replicas could not compute with alike, or an unknown keyword.
        ExactnessError: for a keyword that breaks the promise.
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
    """Return the keywords for the strategy's `check`: one script serves all strategies.

    Keywords of other strategies are left out, and its own if it spreads a model: the rest are
    DistributedDataParallel's. What another strategy would refuse stays: this one refuses it, too.

    `is_trained`: whether the model has trainable parameters: every rank holds all of one that has none.

    Raises:
        ExactnessError: with `exact`, for one that lets its strategy compute in other numbers than this one.
        ModelError: for buffers of each rank's own, where ranks hold parts of a model.
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
    """Refuse what DDP cannot do, and with `exact` what would break the promise.

    On a single rank, too, where DDP is not used: a script means the same on every layout.

    Raises:
        ExactnessError: for a setting under which ranks would differ.
        ModelError: for sparse gradients, or a setting that DDP does not have or that cannot be passed on.
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


def is_harmless(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a setting is DDP's, or an exchange's, and neither changes results nor is refused."""
    if name in EXCHANGES.keywords():
        return True
    known = inspect.signature(DistributedDataParallel).parameters
    return name in known and (name not in (*REFUSED, *INEXACT) or _is_default(name, settings))


def _is_default(name: str, settings: Mapping[str, Any]) -> bool:
    """Whether a setting has its default value; compared by identity, as it may be a tensor."""
    value = settings.get(name)
    return value is None or value is (name in INEXACT)


def _check_devices(settings: dict[str, Any], device: torch.device) -> None:
    """Refuse devices other than the rank's, and any on the CPU, as DDP does."""
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


def shares_buffers(settings: Mapping[str, Any]) -> bool:
    """Whether ranks take replica 0's buffers: always, unless a setting with exact=False switches it off."""
    return named_buffers_of_own(settings) is None


def named_buffers_of_own(settings: Mapping[str, Any]) -> str | None:
    """Return the setting that asks for buffers of each rank's own; `None` if there is none."""
    # The older name is not read beside the newer one, as in DDP.
    newer = "forward_sync_buffers"
    name = "broadcast_buffers" if settings.get(newer) is None else newer
    return name if settings.get(name) is False else None


# --- models ----------------------------------------------------------------------------------------


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


def refuse_changing(module: nn.Module) -> None:
    """Refuse layers that change their parameters in forward passes, or make them there.

    Raises:
        ModelError: naming the first one.
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
    """Return shape, type, and strides of a parameter that is not contiguous: sums depend on them."""
    text = f"{tuple(parameter.shape)} {parameter.dtype}"
    return text if parameter.is_contiguous() else f"{text}, strides {parameter.stride()}"


def is_trainable(module: nn.Module) -> bool:
    """Return whether any parameter of a module is to be trained."""
    return any(parameter.requires_grad for parameter in module.parameters())


def spans_devices(module: nn.Module) -> bool:
    """Return whether the script has put the parts of a module on several devices, where they stay.

    DistributedDataParallel takes such a module without `device_ids`; its forward pass moves activations
    from one device to the next.
    """
    places = {t.device for t in (*module.parameters(), *module.buffers())}
    return len({place for place in places if place.type != "cpu"}) > 1


def as_module(model: Any) -> nn.Module:
    """Return a list of modules as an `nn.Sequential`, and a module as it is.

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
