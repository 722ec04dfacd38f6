"""Modules that the run does not train, such as averaged weights; all ranks take replica 0's buffers."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.strategies.buffers import Buffers
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.passes import watch_forward


class UntrainedModule:
    """A module outside of `run.model` whose buffers are synchronized like those of a wrapped model."""

    is_split = False

    def __init__(self, module: nn.Module, context: ModelContext) -> None:
        self.module = module
        self._buffers = Buffers(module, context.block, context.group, waiting=context.sharing)
        self._watching = False
        self.leave = watch_forward(module, self._before_forward, self._buffers.after_evaluation)

    @property
    def trains_buffers(self) -> bool:
        """Whether a submodule that changes buffers in forward passes is in training mode."""
        return self._buffers.are_trained

    def _before_forward(self) -> None:
        if self._watching:
            self._buffers.before_forward()
            if not torch.compiler.is_compiling():
                self._buffers.before_evaluation()

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """Prepare the buffers for a microbatch, before the loop's body."""
        self._watching = True
        if microbatch.first:
            self._buffers.finish()
            self._buffers.record_shapes()
            self._buffers.restores = microbatch.audit

    def microbatch_ends(self, microbatch: Microbatch, *, left: bool = False) -> None:
        """Synchronize buffers after a microbatch; if the body was `left` early, a later call does so."""
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
        """Broadcast replica 0's buffers to all ranks, if forward passes have changed them."""
        self._buffers.finish()
