"""Errors of torch that a script meets because of how the run holds its models: what they mean."""

from __future__ import annotations

import traceback
from collections.abc import Sequence

from torch.nn.utils import prune

from lockstep.errors import ModelError, RunError, StepError
from lockstep.strategies.wrapped_model import WrappedModel


def explained(error: BaseException, models: Sequence[WrappedModel]) -> RunError | None:
    """Return what an error of the script means, where that is more than it says."""
    if not isinstance(error, RuntimeError):
        return None
    if "nested_tensorlist[0].empty()" in str(error) and any(m.several_replicas for m in models):
        return StepError(
            "torch.nn.utils.clip_grad_value_ found no gradients; on microbatches that are not the last "
            "of their global batch there are none yet",
            hint="run.clip_grad_value_(model, value), which acts once per global batch",
        )
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if prune.__file__ in frames and any(model.is_split for model in models):
        return ModelError(
            "torch.nn.utils.prune was given a model of which each rank holds a part; expected a whole one",
            hint="prune before run.model(model), or strategy='ddp'",
        )
    return None
