"""`AveragedModels`: keeps buffers of untrained modules, such as averaged weights, equal on all ranks."""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from lockstep.engine.data.microbatch import LoopKey
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.untrained_module import UntrainedModule
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.engine.training.listeners import Listener

#: Maximal number of stack frames between the beginning of a loop and torch's `update_bn` around it.
_DEPTH = 16


class AveragedModels(Listener):
    """Modules that the run does not train, such as averages of a model's weights (EMA, SWA).

    On every rank the modules' buffers are set to the values that replica 0 has. `followed` is a list of
    wrappers, one `UntrainedModule` per module; the run's loop calls the wrappers' methods before and after
    each microbatch.
    """

    def __init__(self, context: ModelContext, models: Sequence[WrappedModel]) -> None:
        self.followed: list[UntrainedModule] = []
        self._context, self._models = context, models
        self._passing: list[UntrainedModule] = []  # modules that leave at the end of the loop

    def add(self, value: Any) -> UntrainedModule | None:
        """Wrap `value` in an `UntrainedModule`, add the wrapper to `followed`, and return it.

        Return `None` if `value` is no module, if it shares modules with a known one, and in a run with one
        replica.
        """
        if not isinstance(value, nn.Module) or self._context.replicas == 1:
            return None
        if _share_parts(value, [*self._models, *self.followed]):
            return None
        own = UntrainedModule(value, self._context)
        self.followed.append(own)
        return own

    def loop_begins(self, loop: LoopKey) -> None:
        """If torch's `update_bn` runs the loop, add the model that it updates to `followed`.

        `loop_ends` removes this model. Modules that the script has passed to `run.model` in the meantime
        are removed from `followed` now.
        """
        for one in [one for one in self.followed if _share_parts(one.module, self._models)]:
            one.leave()  # the script has passed it to `run.model` since
            self.followed.remove(one)
        if torch.is_grad_enabled():
            return
        added = self.add(_of_update_bn(sys._getframe(1)))
        if added is not None:
            self._passing.append(added)

    def loop_ends(self, loop: LoopKey, step: int, *, early: bool) -> None:
        """Remove the model of `update_bn` that `loop_begins` has added to `followed`, if any."""
        while self._passing:
            followed = self._passing.pop()
            followed.leave()
            self.followed.remove(followed)


def _share_parts(module: nn.Module, known: Sequence[WrappedModel | UntrainedModule]) -> bool:
    parts = {id(part) for one in known for part in one.module.modules()}
    return not parts.isdisjoint(map(id, module.modules()))


def _of_update_bn(frame: FrameType) -> Any:
    """Return the model passed to torch's `update_bn`, if that function is among the callers of `frame`.

    `update_bn` has no hooks and passes its model to no other function.
    """
    swa_utils = sys.modules.get("torch.optim.swa_utils")
    if swa_utils is None:
        return None
    code = swa_utils.update_bn.__wrapped__.__code__
    for caller, _ in itertools.islice(traceback.walk_stack(frame), _DEPTH):
        if caller.f_code is code:
            return caller.f_locals["model"]
    return None
