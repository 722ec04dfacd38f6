"""Compressed exchanges: gradients are sent in fewer bits, or as matrices of lower rank.

A rank that hosts several replicas adds their gradients before it sends the sum. Additional elements at the
end of the last bucket, such as flags of parameters in use, are sent uncompressed.
"""

from __future__ import annotations

import abc

import torch

from lockstep.engine.exchange.base import ExchangeContext, Forest, ScratchExchange, Sum, done
from lockstep.engine.exchange.tree import GroupWire, TreeExchange


class CompressedExchange(ScratchExchange):
    """Base class of exchanges that compress gradients to send less; their sums are approximate."""

    def __init__(self, context: ExchangeContext) -> None:
        forest = context.forest
        super().__init__(forest)
        self._wire = GroupWire(context.group)
        #: The reduction tree over ranks, with one node per rank.
        self.ranks = Forest.of(forest.size, forest.size, forest.rank)
        self._extra = self._notes_sent = 0

    def slots(self, bucket: torch.Tensor, extra: int = 0) -> list[torch.Tensor]:
        """Return tensors for this rank's partial sums, each `extra` elements longer than `bucket`."""
        self._extra = extra
        return super().slots(bucket, extra)

    def start(self, slots: list[torch.Tensor], *, last: bool, place: int = 0) -> Sum:
        """Begin to add `slots`, this rank's partial sums, over all ranks; return a future of the total.

        `last` and `place` are as in `Exchange.start`.
        """
        whole, *others = slots
        for node in others:
            whole.add_(node)
        size = whole.numel() - self._extra
        notes = whole[size:]
        gathered = notes.new_empty(self.ranks.size, self._extra)
        self._notes_sent += gathered.nbytes - notes.nbytes
        work = self._wire.gather(notes.contiguous(), gathered.view(-1)) if self._extra else None
        total = self._sum(whole[:size], last=last)
        if last:
            self._scratch.pass_ends()
        if work is None:
            return total
        summed = total.wait()
        work.wait()
        return done(torch.cat([summed, self.ranks.sum(list(gathered))]))

    @abc.abstractmethod
    def _sum(self, bucket: torch.Tensor, *, last: bool) -> Sum:
        """Begin to sum `bucket` over all ranks; return a future of the sum. May overwrite `bucket`.

        `last`: whether this is the last bucket of a backward pass.
        """


class HalfExchange(CompressedExchange):
    """Exchange that sends gradients in 16 bits, and adds them in their own dtype, in a fixed order.

    The exchange `bf16` rounds to 3 significant digits. `fp16` rounds to 4 significant digits, and has no
    finite values above 65,504.
    """

    def __init__(self, context: ExchangeContext) -> None:
        super().__init__(context)
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[context.name]
        self._tree = TreeExchange(self._wire, self.ranks, dtype)

    @property
    def sent(self) -> int:
        """Number of bytes that this rank has sent."""
        return self._tree.sent + self._notes_sent

    def _sum(self, bucket: torch.Tensor, *, last: bool) -> Sum:
        return self._tree.add([bucket], last=last)
