"""Compressed exchanges: gradients are sent in fewer bits, or as matrices of lower rank.

A rank that hosts several replicas adds their gradients before it sends the sum. Additional elements at the
end of the last bucket, such as flags of parameters in use, are sent uncompressed.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch

from lockstep.engine.exchange.base import Exchange, ExchangeContext, Forest, Sum, done
from lockstep.engine.exchange.scratch import Scratch
from lockstep.engine.exchange.tree import GroupWire, TreeExchange, Wire, Work


class CompressedExchange(Exchange):
    """Base class of exchanges that compress gradients to send less; their sums are approximate."""

    exact = False

    def __init__(self, wire: Wire, forest: Forest) -> None:
        self._wire = wire
        self._own = forest.own
        #: The reduction tree over ranks, with one node per rank.
        self.ranks = Forest.of(forest.size, forest.size, forest.rank)
        self._scratch = Scratch()
        self._extra = 0

    @property
    def sent(self) -> int | None:
        """Number of bytes that this rank has sent."""
        return self._wire.sent

    def slots(self, bucket: torch.Tensor, extra: int = 0) -> list[torch.Tensor]:
        """Return tensors for this rank's partial sums, each `extra` elements longer than `bucket`.

        For a single sum without `extra` elements this is `bucket` itself.
        """
        self._extra = extra
        if self._own == 1 and not extra:
            return [bucket]
        size = bucket.numel() + extra
        return [self._scratch.take(bucket, size) for _ in range(self._own)]

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
    """Exchange that sends gradients in 16 bits, and adds them in their own type in a fixed order.

    `dtype`: `torch.bfloat16`, which rounds to 3 significant digits, or `torch.float16`, which rounds to 4
    significant digits and has no finite values above 65,504.
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
    """Collectives for the tree exchange that convert all elements to 16 bits before they send them."""

    def __init__(self, wire: Wire, dtype: torch.dtype) -> None:
        self._wire, self._dtype = wire, dtype

    @property
    def sent(self) -> int:
        """Number of bytes that this rank has sent."""
        return self._wire.sent

    def scatter(
        self, outgoing: torch.Tensor, received: torch.Tensor, shares: Sequence[int]
    ) -> Work:
        """Begin an all-to-all in 16 bits: each rank receives one part of every rank's `outgoing`.

        The arguments are those of `Wire.scatter`.
        """
        arriving = received.new_empty(received.numel(), dtype=self._dtype)
        work = self._wire.scatter(outgoing.to(self._dtype), arriving, shares)
        return _Widening(work, arriving, received)

    def gather(self, part: torch.Tensor, total: torch.Tensor) -> Work:
        """Begin an all-gather in 16 bits: the `part` of every rank is written to `total`, in rank order."""
        arriving = total.new_empty(total.numel(), dtype=self._dtype)
        return _Widening(self._wire.gather(part.to(self._dtype), arriving), arriving, total)


class _Widening:
    """A running collective; `wait` converts its 16-bit result to the type of `target`."""

    def __init__(self, work: Work, arriving: torch.Tensor, target: torch.Tensor) -> None:
        self._work, self._arriving, self._target = work, arriving, target

    def wait(self) -> None:
        """Wait until the collective is complete, and convert its 16-bit result into the target tensor."""
        self._work.wait()
        self._target.copy_(self._arriving)


def build(context: ExchangeContext) -> HalfExchange:
    """Return the exchange that sends gradients as `bf16` or `fp16`, according to `context.name`."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[context.name]
    return HalfExchange(GroupWire(context.group), context.forest, dtype, context.name)
