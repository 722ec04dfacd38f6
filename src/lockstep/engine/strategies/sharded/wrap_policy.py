"""Choice of the submodules ("units") that FSDP2's `fully_shard` shards and gathers separately."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from lockstep.engine.strategies.checks import refuse_sparse
from lockstep.errors import ModelError
from lockstep.registry import OF_FULLY_SHARD, STRATEGIES

#: A submodule with fewer parameters is sharded with the rest of the model, to send fewer messages.
MIN_PARAMETERS = 65_536
#: When parameters are gathered: before each use of a unit, or once for a global batch.
GATHERS = ("unit", "batch")
_KEYWORDS = STRATEGIES.find("fsdp").keywords
_KINDS = {"mp_policy": MixedPrecisionPolicy, "offload_policy": OffloadPolicy}
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_WHY = {
    "mesh": "ranks shard over the run's own mesh",
    "dp_mesh_dims": "ranks shard over the run's own mesh",
    "ignored_params": "their gradients would not meet",
}


def check_sharding(
    module: nn.Module, settings: dict[str, Any], *, exact: bool, device: torch.device
) -> None:
    """Check a model and the keywords that `run.model` passes to `fully_shard`.

    Raises:
        ModelError: for an unknown keyword, a model that is sharded already, sparse gradients, or
            parameters that have no dimensions, are complex, or are not contiguous.
    """
    for name in settings:
        if name not in _KEYWORDS:
            known = inspect.signature(fully_shard).parameters
            why = _WHY.get(name, "fully_shard does not have it" if name not in known else "")
            raise ModelError(
                f"run.model was given {name}, which strategy=fsdp does not take: {why}",
                hint=f"its settings are {', '.join(_KEYWORDS)}",
            )
    if settings.get("gather", "unit") not in GATHERS:
        raise ModelError(
            f"gather={settings['gather']!r}; expected {' or '.join(map(repr, GATHERS))}"
        )
    for name, kind in _KINDS.items():
        if name in settings and not isinstance(settings[name], kind):
            what = type(settings[name]).__name__
            raise ModelError(
                f"{name} is a {what}; expected a {kind.__name__} of torch.distributed.fsdp"
            )
    refuse_sparse(module)
    for name, part in module.named_modules():
        if isinstance(part, FSDPModule):
            raise ModelError(
                f"{name or type(module).__name__} is sharded already; expected a model that shares no part "
                "with another one of the run",
                hint="give run.model both in one Module",
            )
    for name, parameter in module.named_parameters():
        _check_parameter(name, parameter)


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    problem, hint = None, None
    if isinstance(parameter, DTensor):
        problem = "is a DTensor already"
    elif parameter.dim() == 0:
        problem, hint = "has no dimension to be cut along", "give it the shape (1,)"
    elif parameter.is_complex():
        problem = "is complex"
        hint = "make it real, with a last dimension of two, and use torch.view_as_complex of it"
    elif not parameter.is_contiguous():
        problem = "is not contiguous in memory"
        hint = "leave out memory_format, or parameter.data = parameter.data.contiguous()"
    if problem is not None:
        raise ModelError(
            f"the parameter {name} {problem}; strategy=fsdp cannot shard it", hint=hint
        )


def shard(module: nn.Module, mesh: DeviceMesh, settings: dict[str, Any]) -> list[FSDPModule]:
    """Shard `module` in place by `fully_shard`; return the sharded submodules, and `module` last.

    `settings`: keywords of `run.model`, such as `wrap` with the submodules to shard separately. Invalid
    names in `wrap`, and errors of `fully_shard`, raise a `ModelError`.
    """
    wrap = settings.get("wrap")
    names = _default(module) if wrap is None else _asked(module, wrap)
    _check_units(module, names)
    # The model's own unit is resharded after a forward pass, too: otherwise the model's registered
    # parameters would be the gathered ones after an evaluation.
    passed: dict[str, Any] = {"reshard_after_forward": True}
    passed |= {name: settings[name] for name in OF_FULLY_SHARD if name in settings}
    parts = [module.get_submodule(name) for name in names]
    units = []
    for part in [*dict.fromkeys(parts), module]:
        try:
            units.append(fully_shard(part, mesh=mesh, **passed))
        except (
            AssertionError, AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError
        ) as error:  # fmt: skip
            what = str(error).partition("\n")[0]
            raise ModelError(f"fully_shard does not take {type(part).__name__}: {what}") from error
    return units


def _default(module: nn.Module, prefix: str = "", *, listed: bool = False) -> list[str]:
    """Return the names of the submodules that FSDP2 shards separately by default.

    Such a submodule has at least `MIN_PARAMETERS` parameters, and shares none with another one. It is a
    child of a Sequential, ModuleList or ModuleDict, or contains none of these containers.

    Two arguments are for recursive calls. `prefix`: beginning of the names. `listed`: whether `module` is
    such a container.
    """
    names = []
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        has_container = any(isinstance(part, _CONTAINERS) for part in child.modules())
        if isinstance(child, _CONTAINERS):
            names += _default(child, f"{path}.", listed=True)
        elif has_container and not listed:
            names += _default(child, f"{path}.")
        elif sum(p.numel() for p in child.parameters()) >= MIN_PARAMETERS:
            names.append(path)
    owners = _units_of(module, names) if not prefix else {}
    # Submodules that share a parameter become no units.
    tied = {name for units in owners.values() if len(units) > 1 for name in units}
    return [name for name in names if name not in tied]


def _asked(module: nn.Module, wrap: Any) -> list[str]:
    if isinstance(wrap, str) or not isinstance(wrap, Sequence):
        raise ModelError(
            f"wrap is a {type(wrap).__name__}; expected a list of module classes or names"
        )
    there = {name: part for name, part in module.named_modules() if name}
    found: list[str] = []
    for one in wrap:
        if isinstance(one, type):
            names = [name for name, part in there.items() if isinstance(part, one)]
        else:
            names = [one] if one in there else []
        if not names:
            raise ModelError(
                f"wrap names {one!r}, which {type(module).__name__} does not have",
                hint=f"its parts are {', '.join(list(there)[:20]) or 'none'}",
            )
        found += names
    # Inner submodules first, as fully_shard requires.
    return sorted(dict.fromkeys(found), key=lambda name: -name.count("."))


def _units_of(module: nn.Module, names: Sequence[str]) -> dict[nn.Parameter, set[str]]:
    """Return, for each parameter, the names of the separately sharded submodules that use it.

    `names`: all such submodules. A use by the rest of the model has the name "".
    """
    there = dict(module.named_modules(remove_duplicate=False))
    # By identity: one submodule may have several names.
    units = {id(there[name]): name for name in reversed(names)} | {id(module): ""}
    owners: dict[nn.Parameter, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        path = name.rpartition(".")[0]
        while id(there[path]) not in units:
            path = path.rpartition(".")[0]
        owners.setdefault(parameter, set()).add(units[id(there[path])])
    return owners


def _check_units(module: nn.Module, names: Sequence[str]) -> None:
    """Raise a `ModelError` if units share a parameter, or if one unit has parameters of several dtypes.

    A unit is a separately sharded submodule, one of `names`; the rest of the model is one more unit. Only
    the dtypes of trainable parameters count.
    """
    types: dict[str, set[torch.dtype]] = {}
    for parameter, units in _units_of(module, names).items():
        if len(units) > 1:
            shown = " and ".join(sorted(unit or "the rest of the model" for unit in units))
            raise ModelError(
                f"{shown} share a parameter; expected units of `wrap` that share none",
                hint="wrap a module that holds both, or neither",
            )
        if parameter.requires_grad:
            (unit,) = units
            types.setdefault(unit, set()).add(parameter.dtype)
    for unit, found in types.items():
        if len(found) > 1:
            raise ModelError(
                f"{unit or 'the rest of the model'} has trainable parameters of the types "
                f"{', '.join(sorted(map(str, found)))}; expected one type in each unit",
                hint="`wrap=` makes units; use one type, and precision= for the rest",
            )
