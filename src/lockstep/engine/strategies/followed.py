"""Modules that the run does not train, such as averages of weights: buffers of replica 0."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.strategies.buffers import Buffers
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.passes import watch_forward


class FollowedModule:
    """A module whose forward passes in loops change its buffers as those of a model do.

    Args:
        module: the module.
        context: where the run's models live.
    """

    is_split = False

    def __init__(self, module: nn.Module, context: ModelContext) -> None:
        self.module = module
        self._buffers = Buffers(module, context.block, context.group, waiting=context.sharing)
        self._watching = False
        self.leave = watch_forward(module, self._before_forward, self._buffers.after_evaluation)

    @property
    def trains_buffers(self) -> bool:
        """Whether forward passes may change buffers."""
        return self._buffers.are_trained

    def _before_forward(self) -> None:
        if self._watching:
            self._buffers.before_forward()
            if not torch.compiler.is_compiling():
                self._buffers.before_evaluation()

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """The loop's body is about to see `microbatch`."""
        self._watching = True
        if microbatch.first:
            self._buffers.finish()
            self._buffers.look()
            self._buffers.restores = microbatch.audit

    def microbatch_ends(self, microbatch: Microbatch, *, left: bool = False) -> None:
        """The loop's body is done with `microbatch`; where it was left, buffers wait for the next call."""
        self._watching = False
        if microbatch.audit:
            self._buffers.discard()
        elif not microbatch.last:
            self._buffers.next_replica()
        elif not left:
            self._buffers.finish()
        if microbatch.last or left:
            self._buffers.look_away()

    def finish_buffers(self) -> None:
        """Let all ranks take replica 0's buffers now."""
        self._buffers.finish()
