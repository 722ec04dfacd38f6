"""`TreeExchange`: all-reduce whose additions follow a fixed tree over replicas, so that sums are exact.

The all-reduce consists of an all-to-all, additions and an all-gather; torch or MPI sends the messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from lockstep.engine.exchange.base import Forest, ScratchExchange, Sum, future_on
from lockstep.world import accelerator


class Work(Protocol):
    """A collective operation that has begun, as `torch.distributed.Work`."""

    def wait(self) -> object:
        """Wait until the operation is complete."""


class Wire(Protocol):
    """Interface of the collective operations by which the tree exchange copies tensors between ranks."""

    def scatter(
        self, outgoing: torch.Tensor, received: torch.Tensor, shares: Sequence[int]
    ) -> Work:
        """Begin an all-to-all: each rank receives one part of the `outgoing` tensor of every rank.

        Args:
            outgoing: flat tensor with a part of equal size for each rank, in rank order.
            received: flat tensor for the parts that this rank receives, in rank order.
            shares: for each rank, the number of elements that this rank receives from it.
        """

    def gather(self, part: torch.Tensor, total: torch.Tensor) -> Work:
        """Begin an all-gather: the `part` of every rank is written to `total`, in rank order."""


class GroupWire:
    """Collectives for the tree exchange, by a process group's backend, such as Gloo or NCCL."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def scatter(
        self, outgoing: torch.Tensor, received: torch.Tensor, shares: Sequence[int]
    ) -> Work:
        """Begin an all-to-all: each rank receives one part of the `outgoing` tensor of every rank.

        The arguments are those of `Wire.scatter`.
        """
        size = len(shares)
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
        """Begin an all-gather: the `part` of every rank is written to `total`, in rank order."""
        work: dist.Work | None = all_gather(total, part, group=self._group, async_op=True)
        assert work is not None
        return work


@dataclass(slots=True)
class _Pending:
    """A bucket of gradients whose all-to-all or all-gather has begun."""

    work: Work
    received: torch.Tensor
    future: Sum
    numel: int
    dtype: torch.dtype


class TreeExchange(ScratchExchange):
    """All-reduce in which each rank sums one share of every bucket, in the order of the reduction tree.

    Each rank sends as many bytes as in a ring all-reduce, if it has a single sum over its replicas to send.
    Operations of neighbouring buckets overlap; all ranks begin them in the same order.

    `dtype`: type to which elements are rounded before they are sent; `None` for the type of the gradients.
    """

    sent = 0

    def __init__(self, wire: Wire, forest: Forest, dtype: torch.dtype | None = None) -> None:
        super().__init__(forest, divisor=forest.size)  # so that all ranks have equal shares
        self._wire, self._dtype = wire, dtype
        self._side = accelerator.SideStream()
        self._pending: _Pending | None = None
        self._gathering: list[_Pending] = []

    def start(self, slots: list[torch.Tensor], *, last: bool, place: int = 0) -> Sum:
        """Begin to add `slots`, this rank's partial sums, over all ranks; return a future of the total.

        `last` and `place` are as in `Exchange.start`.
        """
        future = future_on(slots[0].device)
        with self._side.after(slots):  # so that the backward pass goes on while buckets are awaited
            scattered = self._scatter(slots, future)
            self._sum_pending()
            self._pending = scattered
            if last:
                self._sum_pending()
                self._finish()
        return future

    def _converted(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return `tensor` as `dtype`, in memory that later backward passes reuse."""
        if tensor.dtype == dtype:
            return tensor
        like = tensor.new_empty(0, dtype=dtype)
        return self._scratch.take(like, tensor.numel()).view(tensor.shape).copy_(tensor)

    def _scatter(self, slots: list[torch.Tensor], future: Sum) -> _Pending:
        size, own = self._forest.size, self._forest.own
        numel, dtype = slots[0].numel(), slots[0].dtype
        share = self._padded(numel) // size
        memory = slots[0].as_strided((own, size, share), (share * size, share, 1))
        # One block per receiving rank: that rank's share of each of this rank's nodes.
        outgoing = memory.transpose(0, 1).contiguous().view(-1)
        outgoing = outgoing.to(self._dtype or dtype)
        received = self._scratch.take(outgoing, sum(self._forest.counts) * share)
        shares = [count * share for count in self._forest.counts]
        self.sent += outgoing.nbytes * (size - 1) // size
        work = self._wire.scatter(outgoing, received, shares)
        return _Pending(work, received.view(-1, share), future, numel, dtype)

    def _sum_pending(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.work.wait()
        nodes = self._converted(pending.received, pending.dtype)
        part = self._forest.sum_in_place(list(nodes)).to(pending.received.dtype)
        total = self._scratch.take(part, part.numel() * self._forest.size)
        self.sent += total.nbytes - part.nbytes
        pending.work, pending.received = self._wire.gather(part, total), total
        self._gathering.append(pending)

    def _finish(self) -> None:
        gathering, self._gathering = self._gathering, []
        for item in gathering:
            item.work.wait()
            total = self._converted(item.received, item.dtype)
            item.future.set_result(total[: item.numel])
        self._scratch.pass_ends()


#: All-gather into one tensor: torch 2.13 has renamed it, and warns about the name in torch 2.11.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
