"""A model without trainable parameters: every rank has it, nothing of it meets."""

from __future__ import annotations

from torch import nn

from lockstep.data.microbatch import Microbatch
from lockstep.strategies.held import HeldModel


class FrozenModel(HeldModel):
    """The user's own module; its buffers are still replica 0's."""

    @property
    def wrapped(self) -> nn.Module:
        """The user's own module."""
        return self.module

    def _prepare(self, microbatch: Microbatch) -> None:
        pass  # nothing to synchronise

    def _meet(self, microbatch: Microbatch) -> None:
        raise AssertionError("a model without trainable parameters has no gradients")


def is_trainable(module: nn.Module) -> bool:
    """Return whether any parameter of a module is to be trained."""
    return any(parameter.requires_grad for parameter in module.parameters())
