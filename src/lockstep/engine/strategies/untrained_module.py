"""Modules that the run does not train, such as averages of weights: their buffers are replica 0's."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.strategies.buffers import Buffers
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.passes import watch_forward


class UntrainedModule:
    """A module whose forward passes in loops change its buffers as those of a model do."""

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
        """Begin a microbatch, before the loop's body."""
        self._watching = True
        if microbatch.first:
            self._buffers.finish()
            self._buffers.record_shapes()
            self._buffers.restores = microbatch.audit

    def microbatch_ends(self, microbatch: Microbatch, *, left: bool = False) -> None:
        """End a microbatch; where the body was left, buffers wait for the next call."""
        self._watching = False
        if microbatch.audit:
            self._buffers.discard()
        elif not microbatch.last:
            self._buffers.next_replica()
        elif not left:
            self._buffers.finish()
        if microbatch.last or left:
            self._buffers.end_batch()

    def finish_buffers(self) -> None:
        """Let all ranks take replica 0's buffers now."""
        self._buffers.finish()
