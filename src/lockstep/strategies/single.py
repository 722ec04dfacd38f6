"""One rank hosts all replicas: no process group, no wrapper, the same sums."""

from __future__ import annotations

from torch import nn

from lockstep.data.microbatch import Microbatch
from lockstep.strategies.contributions import take_gradients
from lockstep.strategies.held import HeldModel


class SingleModel(HeldModel):
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
            self._check_reached(reached=any(p.grad is not None for p in self.parameters))
            return
        gradients = take_gradients(self.parameters)
        self._check_reached(reached=any(gradient is not None for gradient in gradients))
        self.contributions.push(gradients)
        if microbatch.last:
            (total,) = self.contributions.take()
            for parameter, gradient in zip(self.parameters, total, strict=True):
                parameter.grad = gradient
