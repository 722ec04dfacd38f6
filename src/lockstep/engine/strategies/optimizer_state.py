"""Loading of an optimizer's `state_dict`, which identifies parameters by numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer


def numbered(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """Return the parameters of an optimizer, keyed by their numbers in `state`, its `state_dict`."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    return dict(zip(numbers, parameters, strict=False))


def load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a `state_dict`; tensors keep their saved types, which torch 2.13 casts to the parameters' type.

    `param_groups` and `state` remain the same objects, since two optimizers may share them.
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
