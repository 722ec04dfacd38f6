"""Clipping the gradients of a whole global batch: by their norm, and by value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from lockstep.errors import ModelError
from lockstep.strategies.gradient_norm import each_norm, total_norm
from lockstep.strategies.wrapped_model import WrappedModel


def listed(parameters: Any) -> list[torch.Tensor]:
    """Return the parameters of a model, or what a script has given in the place of one, as a list."""
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    return list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)


def clip(
    parameters: Sequence[torch.Tensor],
    max_norm: float,
    norm_type: float,
    models: Sequence[WrappedModel],
) -> torch.Tensor:
    """Scale gradients so that their total norm is at most `max_norm`, and return the norm before.

    Raises:
        ModelError: if they belong to several models of which one is split over ranks.
    """
    if not any(model.is_split for model in models):
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = total_norm(each_norm(gradients, norm_type), norm_type)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm
    own = {id(p) for p in parameters}
    owners = [model for model in models if own & {id(p) for p in model.parameters}]
    if not owners or (len(owners) > 1 and not all(model.mixes for model in owners)):
        raise ModelError(
            f"run.clip_grad_norm_ was given parameters of {len(owners)} models; expected those of one, "
            "since a model is split over ranks"
        )
    norm = owners[0].total_norm(parameters, norm_type)
    owners[0].clip(parameters, max_norm, norm)
    return norm


def clip_values(
    parameters: Sequence[torch.Tensor], value: float, models: Sequence[WrappedModel]
) -> None:
    """Clamp gradients of `parameters` to `-value` to `value`."""
    for model in models:
        own = {id(p) for p in model.parameters}
        model.clip_values([p for p in parameters if id(p) in own], value)
