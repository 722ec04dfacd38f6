"""Exchange `native`: the process group's all-reduce, whose backend chooses the order of additions."""

from __future__ import annotations

from typing import cast

import torch
import torch.distributed as dist

from lockstep.engine.exchange.base import Exchange, ExchangeContext, Forest, Sum


class NativeExchange(Exchange):
    """All-reduce by the process group's backend, such as Gloo or NCCL.

    The sum of two ranks with one summand each is exact: IEEE addition of two numbers commutes.
    """

    sent = 0

    def __init__(self, context: ExchangeContext) -> None:
        self._group, self._forest = context.group, context.forest

    @staticmethod
    def is_exact(forest: Forest) -> bool:
        """Whether the order in which the backend adds cannot matter, since it adds two numbers at most."""
        return forest.counts in ((1,), (1, 1))

    def slots(self, bucket: torch.Tensor, extra: int = 0) -> list[torch.Tensor]:
        """Return tensors for this rank's partial sums, each `extra` elements longer than `bucket`.

        Without `extra` the last of the tensors is `bucket` itself.
        """
        size = bucket.numel() + extra
        others = [bucket.new_empty(size) for _ in range(self._forest.own - 1)]
        return [*others, bucket.new_empty(size) if extra else bucket]

    def start(self, slots: list[torch.Tensor], *, last: bool, place: int = 0) -> Sum:
        """Begin to add `slots`, this rank's partial sums, over all ranks; return a future of the total.

        `last` and `place` are as in `Exchange.start`; the all-reduce does not use them.
        """
        *others, total = slots
        for node in others:
            total.add_(node)
        # Bytes of a ring all-reduce, the minimum; the library does not report its algorithm.
        self.sent += 2 * total.nbytes * (self._forest.size - 1) // self._forest.size
        work = dist.all_reduce(total, group=self._group, async_op=True)
        assert work is not None
        return cast("Sum", work.get_future().then(lambda done: done.value()[0]))
