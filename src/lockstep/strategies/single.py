"""Strategy `single`: no sum over ranks, for one rank with all replicas or for no gradients."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from lockstep.data.microbatch import Microbatch
from lockstep.strategies.checks import shares_buffers
from lockstep.strategies.gradient_accumulation import take_gradients
from lockstep.strategies.wrapped_model import WrappedModel


class SingleModel(WrappedModel):
    """The user's own module; the replicas' gradients are added as they come."""

    def __init__(self, module: nn.Module, replicas: int) -> None:
        super().__init__(module, range(replicas), replicas, group=None)

    def _meet(self, microbatch: Microbatch) -> None:
        if not self.several_replicas:
            return
        self.accumulation.push(take_gradients(self.parameters))
        if microbatch.last:
            (total,) = self.accumulation.take()
            for parameter, gradient in zip(self.parameters, total, strict=True):
                parameter.grad = gradient


class FrozenModel(WrappedModel):
    """A model without trainable parameters: every rank has it; its buffers are still replica 0's.

    Args:
        module: the user's model, already on its device.
        block: the replicas of this rank.
        replicas: number of replicas in all.
        group: the process group; `None` for a single rank.
        settings: keyword arguments for DistributedDataParallel, of which one says whose buffers there are.
    """

    def __init__(
        self,
        module: nn.Module,
        block: range,
        replicas: int,
        group: dist.ProcessGroup | None,
        settings: dict[str, Any],
    ) -> None:
        shares = group is None or shares_buffers(settings)
        super().__init__(module, block, replicas, group if shares else None)
        self.exactness = "exact" if shares else "approximate"

    def _meet(self, microbatch: Microbatch) -> None:
        raise AssertionError("a model without trainable parameters has no gradients")


def is_trainable(module: nn.Module) -> bool:
    """Return whether any parameter of a module is to be trained."""
    return any(parameter.requires_grad for parameter in module.parameters())
