"""State of an optimizer: loading of its `state_dict`, and its extras, which the `state_dict` lacks.

Extras are the attributes of an optimizer, and optimizers inside it: a subclass may count steps in an
attribute; SAM and Lookahead have another optimizer as attribute. Parameters are identified by numbers.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lockstep.errors import CheckpointError
from lockstep.state.checkpoint import state_codec
from lockstep.state.checkpoint.parts import local

#: Attributes that optimizers get from torch's schedulers, from profilers and from the run.
_FROM_OTHERS = ("step", "zero_grad", "_step_count", "_opt_called", "_step_supports_amp_scaling")


def numbered(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """Return the parameters of an optimizer, keyed by their numbers in `state`, its `state_dict`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    return dict(zip(numbers, parameters, strict=False))


def load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load `state`, a `state_dict`, into an optimizer; unlike torch, keep the saved dtypes of tensors.

    The optimizer's `param_groups` and `state` remain the same objects, since two optimizers may share them.
    """
    groups, before = optimizer.param_groups, optimizer.state
    optimizer.load_state_dict(state)
    for number, parameter in numbered(optimizer, state).items():
        own = optimizer.state.get(parameter, {})
        for name, value in state["state"].get(number, {}).items():
            now = own.get(name)
            if torch.is_tensor(now) and torch.is_tensor(value) and now.dtype != value.dtype:
                own[name] = value.to(now.device)
    if optimizer.state is not before:
        before.clear()
        before.update(optimizer.state)
        optimizer.state = before
    loaded = optimizer.param_groups
    if loaded is groups:
        return
    for old, new in zip(groups, loaded, strict=True):
        if old is not new:
            old.clear()
            old.update(new)
    loaded[:] = groups
    # The `load_state_dict` of a subclass may have assigned the new list to an inner optimizer.
    inner = (one for one in vars(optimizer).values() if isinstance(one, Optimizer))
    if not any(one.param_groups is loaded for one in inner):
        optimizer.param_groups = groups


# --- what a `state_dict` lacks ---------------------------------------------------------------------


def capture_extras(optimizer: Optimizer, others: Collection[int] = ()) -> dict[str, Any]:
    """Return the state that an optimizer's `state_dict` lacks: attributes and inner optimizers.

    `others`: ids of optimizers that the run saves separately.
    """
    others = {*others, id(optimizer)}
    inner = {
        name: {"state": one.state_dict(), "extras": capture_extras(one, others)}
        for name, one in _inner(optimizer)
        if id(one) not in others
    }
    values: dict[str, Any] = {}
    keyed: dict[str, Any] = {}
    states = [id(one.state) for _, one in _inner(optimizer)]
    attributes = [
        (name, value)
        for name, value in vars(optimizer).items()
        if name not in _of_torch() and id(value) not in states
    ]
    parameters = _parameters(optimizer) if attributes else []
    places = {id(p): place for place, p in enumerate(parameters)}
    for name, value in attributes:
        if isinstance(value, dict) and value and all(id(key) in places for key in value):
            keyed[name] = {places[id(key)]: one for key, one in value.items()}
        else:
            values[name] = value
    aliases = {local(p).untyped_storage().data_ptr() for p in parameters}
    found = {"values": _plain(values, aliases), "keyed": _plain(keyed, aliases)}
    found["inner"] = _plain(inner, set())
    return {kind: own for kind, own in found.items() if own}


def load_extras(optimizer: Optimizer, extras: Mapping[str, Any]) -> None:
    """Restore the optimizer's attributes and inner optimizers from a result of `capture_extras`."""
    for name, one in _inner(optimizer):
        if name in extras.get("inner", {}):
            saved = extras["inner"][name]
            load(one, saved["state"])
            load_extras(one, saved["extras"])
    parameters, own = _parameters(optimizer), vars(optimizer)
    device = parameters[0].device
    for name, value in extras.get("values", {}).items():
        own[name] = _into(own.get(name), value, device)
    for name, value in extras.get("keyed", {}).items():
        keyed = {parameters[place]: one for place, one in value.items()}
        own[name] = _into(own.get(name, {}), keyed, device)


@functools.cache
def _of_torch() -> frozenset[str]:
    """Return the names of attributes that every optimizer gets from torch, its schedulers or the run."""
    return frozenset((*vars(Optimizer([nn.Parameter(torch.zeros(()))], {})), *_FROM_OTHERS))


def _inner(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """Yield the optimizers inside an optimizer, each with its name.

    They are attributes, or items of lists, tuples and dictionaries that are attributes.
    """
    for name, value in vars(optimizer).items():
        if isinstance(value, Optimizer):
            yield name, value
        elif name not in _of_torch() and isinstance(value, list | tuple | dict):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            yield from ((f"{name}.{key}", one) for key, one in pairs if isinstance(one, Optimizer))


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _plain(values: dict[str, Any], aliases: set[int]) -> dict[str, Any]:
    """Return those entries of `values` that can be saved and share no memory with a parameter.

    `values`: attributes of an optimizer, by name. `aliases`: addresses of the memory of the parameters,
    which are saved with their models.
    """
    plain: dict[str, Any] = {}
    for name, value in values.items():
        try:
            _, tensors = state_codec.flatten({name: value})
        except (CheckpointError, RecursionError):
            continue
        own = (local(one).untyped_storage().data_ptr() for one in tensors.values() if one.numel())
        if aliases.isdisjoint(own):
            plain[name] = value
    return plain


def _into(now: Any, saved: Any, device: torch.device) -> Any:
    """Return the value `saved`, copied into the current value `now` where their types allow it.

    A tensor is copied into a tensor of equal shape and dtype, and elements into a dictionary or list. Other
    values are new, with their tensors on `device`; a scalar tensor keeps its device.
    """
    if isinstance(saved, torch.Tensor):
        if isinstance(now, torch.Tensor) and (now.shape, now.dtype) == (saved.shape, saved.dtype):
            with torch.no_grad():
                return now.copy_(saved)
        return saved.to(device) if saved.dim() else saved  # a number of steps may stay on the host
    if isinstance(saved, dict):
        before = now if isinstance(now, dict) else {}
        return _fill(now, {key: _into(before.get(key), one, device) for key, one in saved.items()})
    if isinstance(saved, list | deque):
        olds = [*now] if isinstance(now, list | deque) else []
        olds += [None] * (len(saved) - len(olds))
        listed = [_into(old, one, device) for old, one in zip(olds, saved, strict=False)]
        return _fill(now, deque(listed, saved.maxlen) if isinstance(saved, deque) else listed)
    return saved


def _fill(now: Any, made: Any) -> Any:
    """Replace the content of the container `now` by that of the container `made`, and return `now`.

    If the types differ, return `made`.
    """
    if isinstance(now, dict) and isinstance(made, dict):
        now.clear()
        now.update(made)
    elif type(now) is type(made):
        now.clear()
        now.extend(made)
    else:
        return made
    return now
