"""Errors of a script: what those of torch mean under a run, and that a user's mistake is one message."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Any

from torch.nn.utils import prune

from lockstep.errors import LockstepError, ModelError, RunError, StepError
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


def show_plainly() -> None:
    """Let an error of the user's be one message instead of a traceback, under plain `python` too."""
    if sys.excepthook is not sys.__excepthook__:
        return

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        if isinstance(error, LockstepError):
            sys.stderr.write(f"lockstep: error: {error}\n")
        else:
            sys.__excepthook__(kind, error, trace)

    sys.excepthook = hook
