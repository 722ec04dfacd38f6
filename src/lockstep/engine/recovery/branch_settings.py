"""Settings of optimizers in a branch: a run that begins with a saved state of another run, its parent.

The saved state has the parent's settings, such as learning rates. Settings for which the branch's script
has other values than the parent's script are set again after the state is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from torch.optim import Optimizer

#: For each parameter group of an optimizer, its settings by name.
Settings = list[dict[str, Any]]


def settings_of(optimizer: Optimizer) -> Settings:
    """Return the settings of an optimizer's parameter groups that JSON can represent."""
    plain = (bool, int, float, str, tuple, type(None))
    groups = (
        {
            name: value
            for name, value in group.items()
            if name != "params" and isinstance(value, plain)
        }
        for group in optimizer.param_groups
    )
    found: Settings = json.loads(json.dumps(list(groups)))
    return found


def set_again(
    optimizers: Sequence[Optimizer],
    schedulers: Iterable[Any],
    parents: Sequence[Settings],
    own: Sequence[Settings],
) -> list[str]:
    """Apply optimizer settings, such as `lr`, in which a branch's script differs from its parent's script.

    The loaded state has the parent's settings. If a scheduler has changed a learning rate since the
    parent's start, the branch's learning rate is changed by the same factor. Return one line of text for
    each setting that differs.

    Args:
        optimizers: the run's optimizers, with their loaded state.
        schedulers: the run's schedulers, with their loaded state.
        parents: for each optimizer, the settings that the parent's script began with.
        own: for each optimizer, the settings that the branch's script began with.
    """
    lines = []
    for number, (optimizer, before, now) in enumerate(zip(optimizers, parents, own, strict=False)):
        for place, (group, old, new) in enumerate(
            zip(optimizer.param_groups, before, now, strict=False)
        ):
            for name in [name for name in new if name in old and old[name] != new[name]]:
                group[name] = _carried(group[name], old[name], new[name])
                lines.append(
                    f"{name} of optimizer {number}: {old[name]} in the parent, {new[name]} here"
                )
                bases = [getattr(s, "base_lrs", []) for s in schedulers if s.optimizer is optimizer]
                for base in bases if name == "lr" else ():
                    base[place] = _carried(base[place], old[name], new[name])
    return lines


def _carried(value: Any, old: Any, new: Any) -> Any:
    """Return the value to apply for a setting: `new`, scaled if training has changed the setting (a float).

    Args:
        value: the setting in the loaded state; the factor is `value / old`.
        old: the setting with which the parent's script began.
        new: the setting with which the branch's script began; a list is returned as a tuple.
    """
    if isinstance(new, list):
        return tuple(new)
    is_scaled = value != old and isinstance(value, float) and isinstance(new, float) and old
    return value * new / old if is_scaled else new
