"""Modules that the run does not train, such as averaged weights; their buffers are synchronized."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.strategies.buffers import Buffers
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.passes import watch_forward


class UntrainedModule:
    """A module that the run does not train, such as averaged weights; its buffers are synchronized."""

    is_split = False

    def __init__(self, module: nn.Module, context: ModelContext) -> None:
        self.module = module
        self.buffers = Buffers(module, context.block, context.group, waiting=context.sharing)
        self._watching = False
        self.leave = watch_forward(module, self._before_forward, self.buffers.after_evaluation)

    def _before_forward(self) -> None:
        if self._watching:
            self.buffers.before_forward()
            if not torch.compiler.is_compiling():
                self.buffers.before_evaluation()

    def microbatch_begins(self, microbatch: Microbatch) -> None:
        """Prepare a module's buffers for a microbatch (one replica's share of a batch).

        Called before the loop's body. In the first microbatch of a batch, buffers of an earlier batch are
        synchronized, and shapes are recorded.
        """
        self._watching = True
        if microbatch.first:
            self.buffers.finish()
            self.buffers.record_shapes()
            self.buffers.restores = microbatch.audit

    def microbatch_ends(self, microbatch: Microbatch, *, left: bool = False) -> None:
        """Reset or synchronize buffers after a microbatch (one replica's share of a batch).

        They are synchronized over ranks after this rank's last microbatch of the batch. `left`: whether
        `break` or an exception has ended the loop's body. Then `buffers.finish` synchronizes the buffers
        later.
        """
        self._watching = False
        if microbatch.audit:
            self.buffers.discard()
        elif not microbatch.last:
            self.buffers.next_replica()
        elif not left:
            self.buffers.finish()
        if microbatch.last or left:
            self.buffers.end_batch()
