"""Exchange `tree`: all-to-all of shares, sums in tree order, all-gather; over torch or MPI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from lockstep.engine.exchange.base import Exchange, ExchangeContext, Forest, Sum, future_on
from lockstep.engine.exchange.scratch import Scratch


class Work(Protocol):
    """A collective that has begun."""

    def wait(self) -> object:
        """Wait until it is complete."""


class Wire(Protocol):
    """Collectives that move tensors between ranks and change no bit of them; all ranks call alike."""

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent."""

    def scatter(
        self, outgoing: torch.Tensor, received: torch.Tensor, shares: Sequence[int]
    ) -> Work:
        """Begin to give each rank its part of `outgoing`, and to receive one's own of all ranks.

        Args:
            outgoing: flat; as many elements for each rank, in rank order.
            received: flat; what the ranks send, in rank order.
            shares: how many elements each rank sends.
        """

    def gather(self, part: torch.Tensor, total: torch.Tensor) -> Work:
        """Begin to write the `part` of every rank to `total`, in rank order."""


class GroupWire:
    """A process group: Gloo, NCCL or another."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.sent = 0

    def scatter(
        self, outgoing: torch.Tensor, received: torch.Tensor, shares: Sequence[int]
    ) -> Work:
        """Begin an all-to-all."""
        size = len(shares)
        self.sent += outgoing.nbytes * (size - 1) // size
        work: dist.Work | None = dist.all_to_all_single(
            received,
            outgoing,
            output_split_sizes=list(shares),
            input_split_sizes=[outgoing.numel() // size] * size,
            group=self._group,
            async_op=True,
        )
        assert work is not None
        return work

    def gather(self, part: torch.Tensor, total: torch.Tensor) -> Work:
        """Begin an all-gather."""
        self.sent += total.nbytes - part.nbytes
        work: dist.Work | None = all_gather(total, part, group=self._group, async_op=True)
        assert work is not None
        return work


@dataclass(slots=True)
class _Pending:
    """A bucket whose shares are being scattered to the ranks that sum them, or gathered."""

    work: Work
    received: torch.Tensor
    future: Sum
    numel: int


class TreeExchange(Exchange):
    """Each rank sums one share of every bucket, in tree order, and gives it to all.

    As much goes over the wire as in a ring all-reduce when every rank has one node. Collectives of
    neighbouring buckets overlap; their order is the same on all ranks.
    """

    exact = True

    def __init__(self, wire: Wire, forest: Forest, name: str = "tree") -> None:
        self.name = name
        self._wire = wire
        self._forest = forest
        self._scratch = Scratch()
        self._pending: _Pending | None = None
        self._gathering: list[_Pending] = []

    @property
    def sent(self) -> int:
        """Bytes that this rank has sent."""
        return self._wire.sent

    def slots(self, bucket: torch.Tensor, extra: int = 0) -> list[torch.Tensor]:
        """Return memory for this rank's nodes, padded so that all shares have one size."""
        size, own = bucket.numel() + extra, self._forest.own
        padded = -(-size // self._forest.size) * self._forest.size
        if own == 1 and padded == bucket.numel():
            return [bucket]
        memory = self._scratch.take(bucket, own * padded).view(own, padded)
        return [memory[i, :size] for i in range(own)]

    def start(self, slots: list[torch.Tensor], *, last: bool, place: int = 0) -> Sum:
        """Begin to sum `slots` over all ranks, and return the sum's future."""
        future = future_on(slots[0].device)
        scattered = self._scatter(slots, future)
        self._sum_pending()
        self._pending = scattered
        if last:
            self._sum_pending()
            self._finish()
        return future

    def _scatter(self, slots: list[torch.Tensor], future: Sum) -> _Pending:
        size, own = self._forest.size, self._forest.own
        numel = slots[0].numel()
        share = -(-numel // size)
        memory = slots[0].as_strided((own, size, share), (share * size, share, 1))
        # One block per receiver: its share of each of this rank's nodes.
        outgoing = memory.transpose(0, 1).contiguous().view(-1)
        received = self._scratch.take(outgoing, sum(self._forest.counts) * share)
        shares = [count * share for count in self._forest.counts]
        work = self._wire.scatter(outgoing, received, shares)
        return _Pending(work, received.view(-1, share), future, numel)

    def _sum_pending(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.work.wait()
        part = self._forest.sum_in_place(list(pending.received))
        total = self._scratch.take(part, part.numel() * self._forest.size)
        work = self._wire.gather(part, total)
        self._gathering.append(_Pending(work, total, pending.future, pending.numel))

    def _finish(self) -> None:
        gathering, self._gathering = self._gathering, []
        for item in gathering:
            item.work.wait()
            item.future.set_result(item.received[: item.numel])
        self._scratch.pass_ends()


#: torch 2.13 has renamed it, and warns about the name that torch 2.11 has.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def build(context: ExchangeContext) -> TreeExchange:
    """Return the exchange over the wire of a process group."""
    return TreeExchange(GroupWire(context.group), context.forest)
