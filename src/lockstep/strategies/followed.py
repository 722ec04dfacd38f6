"""Modules that the run does not train, such as averages of weights: buffers of replica 0."""

from __future__ import annotations

import torch
from torch import nn

from lockstep.data.microbatch import Microbatch
from lockstep.errors import StepError
from lockstep.strategies.buffers import Buffers
from lockstep.strategies.model_context import ModelContext
from lockstep.strategies.passes import watch_forward


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
        self._versions = 0
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
        self._versions = self._version()
        if microbatch.first:
            self._buffers.finish()
            self._buffers.look()
            self._buffers.restores = microbatch.audit

    def microbatch_ends(self, microbatch: Microbatch, *, left: bool = False) -> None:
        """The loop's body is done with `microbatch`; where it was left, buffers wait for the next call.

        Raises:
            StepError: if the body has changed parameters, on each rank as often as it has replicas.
        """
        self._watching = False
        if not left and self._version() != self._versions:
            raise StepError(
                f"parameters of a {type(self.module).__name__} that the run does not train changed in a "
                "loop's body, which each rank runs once per replica; expected one update per global batch",
                hint="update it between the batches of run.batches(…): for batch in run.batches(loader): "
                "for x, y in batch: …; then the update",
            )
        if microbatch.audit:
            self._buffers.discard()
        elif not microbatch.last:
            self._buffers.next_replica()
        elif not left:
            self._buffers.finish()
        if microbatch.last or left:
            self._buffers.look_away()

    def _version(self) -> int:
        return sum(parameter._version for parameter in self.module.parameters())

    def finish_buffers(self) -> None:
        """Let all ranks take replica 0's buffers now."""
        self._buffers.finish()
