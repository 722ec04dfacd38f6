"""Exchange `powersgd`: gradients of matrices are sent as two low-rank factors.

Vogels et al., NeurIPS 2019 (arXiv:1905.13727), as PyTorch implements it for DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from lockstep.engine.exchange.base import ExchangeContext, Sum, done
from lockstep.engine.exchange.compressed import CompressedExchange
from lockstep.engine.exchange.flat import shape_in_memory
from lockstep.errors import ModelError

#: Defaults that differ from PyTorch's: the rank (the paper uses 2 to 4), compression from step 10 on and
#: not 1,000, and an epsilon against division by a column of zeros.
DEFAULTS = {
    "matrix_approximation_rank": 4,
    "start_powerSGD_iter": 10,
    "orthogonalization_epsilon": 1e-8,
}


class PowerSGDExchange(CompressedExchange):
    """PowerSGD with error feedback: each rank adds its last compression error to its next gradient.

    Buckets are summed one after the other. The reason is that PyTorch's hook starts the three collectives
    of a bucket in threads: with several buckets at a time, their order could differ between ranks.
    """

    name = "powersgd"

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context)
        try:
            self._state = PowerSGDState(context.group, **{**DEFAULTS, **context.settings})
        except (ValueError, TypeError) as error:
            raise ModelError(f"PowerSGD does not take its settings: {error}") from None
        self._shapes: list[torch.Size] = []
        self._index = 0
        self._seen: dict[tuple[int, ...], int] = {}

    def announce(self, parameters: Sequence[torch.Tensor]) -> None:
        """Set the parameters whose gradients are in the next bucket."""
        shapes = [shape_in_memory(p) for p in parameters]
        self._shapes = [shape if len(shape) else torch.Size([1]) for shape in shapes]
        # DistributedDataParallel rebuilds buckets after the first step: the error of an old bucket must not
        # be added to a new one.
        key = tuple(id(p) for p in parameters)
        self._index = self._seen.setdefault(key, len(self._seen))

    def _sum(self, bucket: torch.Tensor, *, last: bool) -> Sum:
        def gradients() -> list[torch.Tensor]:
            parts = torch.split(bucket, [shape.numel() for shape in self._shapes])
            return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

        grad_bucket: Any = SimpleNamespace(  # the methods of a GradBucket that PyTorch's hook calls
            buffer=lambda: bucket,
            index=lambda: self._index,
            is_last=lambda: last,
            gradients=gradients,
        )
        mean = powerSGD_hook(self._state, grad_bucket).wait()
        return done(mean.mul_(self.ranks.size))

    def state(self) -> dict[str, int]:
        """Return the number of steps; errors of compression differ between ranks, and are not saved."""
        return {"steps": self._state.iter}

    def load(self, state: Mapping[str, int]) -> None:
        """Load the number of steps from `state`, and reset the errors of compression."""
        self._state.iter = state["steps"]
        for memory in ("error_dict", "p_memory_dict", "q_memory_dict"):
            getattr(self._state, memory).clear()
