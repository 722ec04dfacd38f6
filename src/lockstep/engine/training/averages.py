"""Averages of weights and other modules that the run does not train, but whose buffers loops change."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.untrained_module import UntrainedModule
from lockstep.engine.strategies.wrapped_model import WrappedModel
from lockstep.engine.training.listeners import Listener

#: Frames between a loop that begins and torch's function: those of the loader, and what is put around it.
_DEPTH = 16


class Averages(Listener):
    """Follows modules, so that their buffers are replica 0's on every rank.

    Args:
        context: where the run's models live.
        models: those that the run holds.

    Attributes:
        followed: the followed modules, which the run's loop tells of its microbatches.
    """

    def __init__(self, context: ModelContext, models: Sequence[WrappedModel]) -> None:
        self.followed: list[UntrainedModule] = []
        self._context, self._models = context, models
        self._passing: list[UntrainedModule] = []  # for the length of a loop

    def add(self, value: Any) -> UntrainedModule | None:
        """Follow `value` from here on; `None` where it is no module, or is followed already."""
        if not isinstance(value, nn.Module) or self._context.replicas == 1:
            return None
        if _share_parts(value, [*self._models, *self.followed]):
            return None
        own = UntrainedModule(value, self._context)
        self.followed.append(own)
        return own

    def loop_begins(self, loader: int, epoch: int, round_: int) -> None:
        """A loop over a loader begins: follow the model of torch's `update_bn`, if it is that one's."""
        for one in [one for one in self.followed if _share_parts(one.module, self._models)]:
            one.leave()  # the run has got it as a model since, and follows it as such
            self.followed.remove(one)
        if torch.is_grad_enabled():
            return
        added = self.add(_of_update_bn(sys._getframe(1)))
        if added is not None:
            self._passing.append(added)

    def loop_ends(self, loader: int, epoch: int, round_: int, step: int, *, early: bool) -> None:
        """A loop over a loader is over."""
        while self._passing:
            followed = self._passing.pop()
            followed.leave()
            self.followed.remove(followed)


def _share_parts(module: nn.Module, known: Sequence[WrappedModel | UntrainedModule]) -> bool:
    parts = {id(part) for one in known for part in one.module.modules()}
    return not parts.isdisjoint(map(id, module.modules()))


def _of_update_bn(frame: FrameType | None) -> Any:
    """Return the model whose statistics torch's function computes, if it is what called `frame`, or `None`.

    The function has no place to hook into, and gives the model to nothing but its own loop.
    """
    swa_utils = sys.modules.get("torch.optim.swa_utils")
    if swa_utils is None:
        return None
    code = swa_utils.update_bn.__wrapped__.__code__
    for caller in itertools.islice(_callers(frame), _DEPTH):
        if caller.f_code is code:
            return caller.f_locals["model"]
    return None


def _callers(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back
