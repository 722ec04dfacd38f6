"""PowerSGD: gradients of matrices, sent as products of two low-rank factors.

Vogels et al., NeurIPS 2019 (arXiv:1905.13727), as PyTorch implements it for DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from lockstep.engine.exchange.base import ExchangeContext, Forest, Sum, done
from lockstep.engine.exchange.compressed import CompressedExchange
from lockstep.engine.exchange.flat import shape_in_memory
from lockstep.engine.exchange.tree import GroupWire
from lockstep.errors import ModelError

#: Where they differ from PyTorch's: of higher rank, since the paper takes 2 to 4; from the 10th step on in
#: the place of the 1,000th; and a column of zeros is none to divide by.
DEFAULTS = {
    "matrix_approximation_rank": 4,
    "start_powerSGD_iter": 10,
    "orthogonalization_epsilon": 1e-8,
}


class PowerSGDExchange(CompressedExchange):
    """PowerSGD with error feedback: what a rank's product leaves out, it adds to its next gradient.

    Buckets are summed one after the other: each takes three sums, and the hook begins them in threads
    of the process group's, whose order is another on every rank.

    Raises:
        ModelError: for settings that it refuses.
    """

    name = "powersgd"

    def __init__(
        self, group: dist.ProcessGroup, forest: Forest, settings: Mapping[str, Any]
    ) -> None:
        super().__init__(GroupWire(group), forest)
        try:
            self._state = PowerSGDState(group, **{**DEFAULTS, **settings})
        except (ValueError, TypeError) as error:
            raise ModelError(f"PowerSGD does not take its settings: {error}") from None
        self._shapes: list[torch.Size] = []
        self._index = 0
        self._seen: dict[tuple[int, ...], int] = {}

    @property
    def sent(self) -> None:
        """Not known: PyTorch's hook sends."""
        return None

    def announce(self, parameters: Sequence[torch.Tensor]) -> None:
        """Receive the parameters whose gradients are in the next bucket."""
        shapes = [shape_in_memory(p) for p in parameters]
        self._shapes = [shape if len(shape) else torch.Size([1]) for shape in shapes]
        # DistributedDataParallel makes other buckets after the first step: what was left out of one must
        # not be added to another.
        key = tuple(id(p) for p in parameters)
        self._index = self._seen.setdefault(key, len(self._seen))

    def _sum(self, bucket: torch.Tensor, *, last: bool) -> Sum:
        grad_bucket = _Bucket(bucket, self._index, self._shapes, last)
        mean = powerSGD_hook(self._state, grad_bucket).wait()  # type: ignore[arg-type]
        return done(mean.mul_(self.ranks.size))

    def state(self) -> dict[str, int]:
        """Return the number of steps; errors that ranks feed back are their own, and are not saved."""
        return {"steps": self._state.iter}

    def load(self, state: Mapping[str, int]) -> None:
        """Load what `state` returned, without errors to feed back."""
        self._state.iter = state["steps"]
        for memory in ("error_dict", "p_memory_dict", "q_memory_dict"):
            getattr(self._state, memory).clear()


class _Bucket:
    """A `torch.distributed.GradBucket`, as far as PyTorch's hook uses it."""

    def __init__(
        self, buffer: torch.Tensor, index: int, shapes: Sequence[torch.Size], last: bool
    ) -> None:
        self._buffer, self._index, self._shapes, self._last = buffer, index, shapes, last

    def buffer(self) -> torch.Tensor:
        """Return the gradients, flat."""
        return self._buffer

    def index(self) -> int:
        """Return the number of the bucket."""
        return self._index

    def is_last(self) -> bool:
        """Return whether it is the last one of a backward pass."""
        return self._last

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients in the shapes of their parameters."""
        parts = torch.split(self._buffer, [shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]


def build(context: ExchangeContext) -> PowerSGDExchange:
    """Return the exchange `powersgd`."""
    return PowerSGDExchange(context.group, context.forest, context.settings)
