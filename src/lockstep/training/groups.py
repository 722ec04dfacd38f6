"""Parameter groups that a script adds to an optimizer while it trains: they come back with its state."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer

from lockstep.strategies.wrapped_model import WrappedModel

#: For each group its parameters: the number of the model, and the name there.
Names = list[list[tuple[int, str]]]


def names_of(optimizer: Optimizer, models: Sequence[WrappedModel]) -> Names:
    """Return what the groups of `optimizer` hold."""
    named = {
        id(p): (number, name)
        for number, model in enumerate(models)
        for name, p in model.module.named_parameters()
    }
    return [[named[id(p)] for p in group["params"]] for group in optimizer.param_groups]


def add_missing(optimizer: Optimizer, names: Names, models: Sequence[WrappedModel]) -> None:
    """Add the groups that `optimizer` had when its state was saved, with the settings of new ones.

    Raises:
        KeyError: if a model has no such parameter.
    """
    parameters = [dict(model.module.named_parameters()) for model in models]
    for group in names[len(optimizer.param_groups) :]:
        own = [parameters[number][name] for number, name in group]
        optimizer.add_param_group({"params": own})
