"""Compressed exchanges: gradients in fewer bits, or of lower rank.

What they share: a rank that hosts several replicas adds their gradients first, and the strategy's notes
behind the last bucket cross the wire as they are, beside it, since small numbers in 16 bits are rounded.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch

from lockstep.engine.exchange.base import Exchange, ExchangeContext, Forest, Sum, done
from lockstep.engine.exchange.scratch import Scratch
from lockstep.engine.exchange.tree import GroupWire, TreeExchange, Wire, Work


class CompressedExchange(Exchange):
    """Sums buckets over all ranks, nearly."""

    exact = False

    def __init__(self, wire: Wire, forest: Forest) -> None:
        self._wire = wire
        self._own = forest.own
        #: The ranks, with one node each.
        self.ranks = Forest.of(forest.size, forest.size, forest.rank)
        self._scratch = Scratch()
        self._extra = 0

    @property
    def sent(self) -> int | None:
        """Bytes that this rank has sent."""
        return self._wire.sent

    def slots(self, bucket: torch.Tensor, extra: int = 0) -> list[torch.Tensor]:
        """Return memory for this rank's nodes; the bucket itself where that is enough."""
        self._extra = extra
        if self._own == 1 and not extra:
            return [bucket]
        size = bucket.numel() + extra
        return [self._scratch.take(bucket, size) for _ in range(self._own)]

    def start(self, slots: list[torch.Tensor], *, last: bool, place: int = 0) -> Sum:
        """Begin to sum `slots` over all ranks, and return the sum's future."""
        whole, *others = slots
        for node in others:
            whole.add_(node)
        size = whole.numel() - self._extra
        notes = whole[size:]
        gathered = notes.new_empty(self.ranks.size, self._extra)
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
        """Begin to sum a bucket, whose memory is this method's, and return the sum's future."""


class HalfExchange(CompressedExchange):
    """The tree's sum, shipped in 16 bits: each share is added in full precision and rounded for the way.

    Args:
        dtype: `torch.bfloat16`, which rounds to 3 digits, or `torch.float16`, which rounds to 4 and
            holds nothing above 65,504.
    """

    def __init__(self, wire: Wire, forest: Forest, dtype: torch.dtype, name: str) -> None:
        super().__init__(wire, forest)
        self.name = name
        self._tree = TreeExchange(_HalfWire(wire, dtype), self.ranks, name)

    def _sum(self, bucket: torch.Tensor, *, last: bool) -> Sum:
        (slot,) = self._tree.slots(bucket)
        if slot.data_ptr() != bucket.data_ptr():
            slot.copy_(bucket)
        return self._tree.start([slot], last=last)


class _HalfWire:
    """A wire on which everything is rounded to 16 bits."""

    def __init__(self, wire: Wire, dtype: torch.dtype) -> None:
        self._wire, self._dtype = wire, dtype

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent."""
        return self._wire.sent

    def scatter(
        self, outgoing: torch.Tensor, received: torch.Tensor, shares: Sequence[int]
    ) -> Work:
        """Begin to give each rank its part."""
        arriving = received.new_empty(received.numel(), dtype=self._dtype)
        work = self._wire.scatter(outgoing.to(self._dtype), arriving, shares)
        return _Widening(work, arriving, received)

    def gather(self, part: torch.Tensor, total: torch.Tensor) -> Work:
        """Begin to give all ranks the part of each."""
        arriving = total.new_empty(total.numel(), dtype=self._dtype)
        return _Widening(self._wire.gather(part.to(self._dtype), arriving), arriving, total)


class _Widening:
    """A collective after which 16 bits become more."""

    def __init__(self, work: Work, arriving: torch.Tensor, target: torch.Tensor) -> None:
        self._work, self._arriving, self._target = work, arriving, target

    def wait(self) -> None:
        """Wait until it is complete."""
        self._work.wait()
        self._target.copy_(self._arriving)


def build(context: ExchangeContext) -> HalfExchange:
    """Return the exchange `bf16` or `fp16`."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[context.name]
    return HalfExchange(GroupWire(context.group), context.forest, dtype, context.name)
