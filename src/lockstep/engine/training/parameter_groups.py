"""Finds settings of an optimizer, such as `lr`, that the script has changed within a global batch.

A microbatch that changes a setting would change the update on one layout only, so that the run raises an
error.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

#: An element of `param_groups` of a PyTorch optimizer.
Group = dict[str, Any]
#: Types of values that are compared with `==`; values of unknown types are not compared.
_PLAIN = (bool, int, float, complex, str, bytes, np.generic, type(None))
_EXACTLY = frozenset(_PLAIN)  # quicker to look up


def settings_of(groups: Sequence[Group]) -> list[Group]:
    """Return copies of parameter groups for a later comparison; parameters themselves are not copied."""
    copies = [dict(group) for group in groups]
    for group in copies:
        for name, value in group.items():
            if type(value) not in _EXACTLY and name != "params":
                group[name] = _kept(value)
    return copies


def _kept(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()  # schedulers fill it in place
    if isinstance(value, list | tuple):
        is_plain = type(value) is tuple and _EXACTLY.issuperset(map(type, value))
        return value if is_plain else tuple(map(_kept, value))
    return value if isinstance(value, _PLAIN) else ...


def changed(before: Sequence[Group], groups: Sequence[Group]) -> tuple[str, Any, Any] | None:
    """Compare parameter groups with earlier ones; return the first changed setting, or `None`.

    The result has the setting's name and group as text, its old value and its new one. The number of groups
    counts as a setting; the list of parameters does not.
    """
    if len(before) != len(groups):
        return "the number of parameter groups", len(before), len(groups)
    for number, (old, group) in enumerate(zip(before, groups, strict=True)):
        if all(map(operator.is_, old.values(), group.values())):
            continue  # all values are the same objects, as in nearly every step
        for name, value in old.items():
            now = group.get(name)
            if value is not now and name != "params" and not _same(value, now):
                return f"{name} of group {number}", value, now
    return None


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, torch.Tensor):
        alike = isinstance(now, torch.Tensor) and before.shape == now.shape
        return alike and before.device == now.device and bool((before == now).all())
    if isinstance(before, tuple):
        alike = isinstance(now, list | tuple) and len(before) == len(now)
        return alike and all(map(_same, before, now))
    if not isinstance(now, _PLAIN):
        return before is ... and not isinstance(now, torch.Tensor | list | tuple)
    return bool(before == now)
