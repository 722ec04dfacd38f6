"""State of an optimizer by the numbers that its `state_dict` gives to parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer


def numbered(optimizer: Optimizer, state: Mapping[str, Any]) -> dict[int, torch.Tensor]:
    """Return the parameters of an optimizer by their numbers in `state`, a `state_dict` of one like it."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    return dict(zip(numbers, parameters, strict=False))


def load(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Load a state and keep its types: torch 2.13 casts all of it to the parameters' type.

    `param_groups` and `state` stay the same objects: an optimizer may share them with another one.
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
    _restore_groups(optimizer, groups)


def _restore_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Give an optimizer its former group objects, with the loaded content."""
    loaded = optimizer.param_groups
    if loaded is groups:
        return
    for old, new in zip(groups, loaded, strict=True):
        if old is not new:
            old.clear()
            old.update(new)
    loaded[:] = groups
    # Its own `load_state_dict` may have given the new list to an optimizer inside of it.
    inner = (one for one in vars(optimizer).values() if isinstance(one, Optimizer))
    if not any(one.param_groups is loaded for one in inner):
        optimizer.param_groups = groups
