"""Strategy `single` for one rank, and `FrozenModel` for models without trainable parameters."""

from __future__ import annotations

from typing import Any

from torch import nn

from lockstep.engine.data.microbatch import Microbatch
from lockstep.engine.strategies.checks import shares_buffers
from lockstep.engine.strategies.gradient_accumulation import take_gradients
from lockstep.engine.strategies.model_context import ModelContext
from lockstep.engine.strategies.wrapped_model import WrappedModel


class SingleModel(WrappedModel):
    """A model in a run with a single rank, which sums the gradients over all replicas."""

    def __init__(self, module: nn.Module, context: ModelContext) -> None:
        super().__init__(module, context, shares_buffers=False)

    def _sum_gradients(self, microbatch: Microbatch) -> None:
        if not self.several_replicas:
            return
        self.accumulation.push(take_gradients(self.parameters))
        if microbatch.last:
            (total,) = self.accumulation.take()
            for parameter, gradient in zip(self.parameters, total, strict=True):
                parameter.grad = gradient


def wrap(module: nn.Module, context: ModelContext, _settings: dict[str, Any]) -> SingleModel:
    """Return `module` as the `SingleModel` of a run with one rank; keywords of DDP have no effect."""
    return SingleModel(module, context)


class FrozenModel(WrappedModel):
    """A model without trainable parameters, of which each rank has a copy.

    Its buffers are synchronized over ranks, unless `broadcast_buffers=False` is given.
    """

    def __init__(self, module: nn.Module, context: ModelContext, settings: dict[str, Any]) -> None:
        shares = context.group is None or shares_buffers(settings)
        super().__init__(module, context, shares_buffers=shares)
        self.exactness = "exact" if shares else "approximate"

    def _sum_gradients(self, microbatch: Microbatch) -> None:
        raise AssertionError("a model without trainable parameters has no gradients")
