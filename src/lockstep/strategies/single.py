"""One rank hosts all replicas: no process group, no wrapper, the same sums."""

from __future__ import annotations

from torch import nn

from lockstep.data.microbatch import Microbatch
from lockstep.strategies.gradient_accumulation import take_gradients
from lockstep.strategies.wrapped_model import WrappedModel


class SingleModel(WrappedModel):
    """The user's own module; the replicas' gradients are added as they come."""

    def __init__(self, module: nn.Module, replicas: int) -> None:
        super().__init__(module, range(replicas), replicas, group=None)
        self._replicas = replicas

    @property
    def wrapped(self) -> nn.Module:
        """The user's own module."""
        return self.module

    def _prepare(self, microbatch: Microbatch) -> None:
        pass  # nothing sits between the module and its gradients

    def _meet(self, microbatch: Microbatch) -> None:
        if self._replicas == 1:
            return
        self.contributions.push(take_gradients(self.parameters))
        if microbatch.last:
            (total,) = self.contributions.take()
            for parameter, gradient in zip(self.parameters, total, strict=True):
                parameter.grad = gradient
