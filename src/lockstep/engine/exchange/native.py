"""Exchange `native`: the process group's all-reduce; the backend chooses the order of the sum."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist

from lockstep.engine.exchange.base import Exchange, ExchangeContext, Forest, Sum


class NativeExchange(Exchange):
    """All-reduce by Gloo, NCCL or whatever the process group speaks.

    With two ranks of one node each there is one addition per element, and IEEE addition commutes:
    then the bits are those of the tree.
    """

    name = "native"
    sent = 0

    def __init__(self, group: dist.ProcessGroup, forest: Forest) -> None:
        self._group = group
        self._forest = forest
        self.exact = self.is_exact(forest)

    @staticmethod
    def is_exact(forest: Forest) -> bool:
        """Whether the library's order can only be the tree's."""
        return forest.counts in ((1,), (1, 1))

    def slots(self, bucket: torch.Tensor, extra: int = 0) -> list[torch.Tensor]:
        """Return memory for this rank's nodes; the last is the bucket itself where that is enough."""
        size = bucket.numel() + extra
        others = [bucket.new_empty(size) for _ in range(self._forest.own - 1)]
        return [*others, bucket.new_empty(size) if extra else bucket]

    def start(self, slots: list[torch.Tensor], *, last: bool, place: int = 0) -> Sum:
        """Begin to sum `slots` over all ranks, and return the sum's future."""
        *others, total = slots
        for node in others:
            total.add_(node)
        # As a ring sends it, and no all-reduce sends less: which one the library takes it does not say.
        self.sent += 2 * total.nbytes * (self._forest.size - 1) // self._forest.size
        work = dist.all_reduce(total, group=self._group, async_op=True)
        assert work is not None
        return cast("Sum", work.get_future().then(lambda done: done.value()[0]))


def build(context: ExchangeContext) -> NativeExchange:
    """Return the exchange of a process group."""
    return NativeExchange(context.group, context.forest)
