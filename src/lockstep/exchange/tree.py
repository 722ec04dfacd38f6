"""The sum in tree order over any process group: shares out, sums in order, shares back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from lockstep.exchange.base import Forest, Sum


@dataclass(slots=True)
class _Pending:
    """A bucket whose nodes are on their way to the ranks that sum them."""

    work: dist.Work
    received: torch.Tensor
    future: Sum
    numel: int


@dataclass(slots=True)
class _Gathering:
    """A bucket whose sums are on their way back."""

    work: dist.Work
    total: torch.Tensor
    future: Sum
    numel: int


class TreeExchange:
    """Each rank sums one share of every bucket, in tree order, and gives it to all.

    As much goes over the wire as in a ring all-reduce when every rank has one node. Collectives of
    neighbouring buckets overlap; their order is the same on all ranks.
    """

    name = "tree"
    exact = True

    def __init__(self, group: dist.ProcessGroup, forest: Forest) -> None:
        self._group = group
        self._forest = forest
        self._pending: _Pending | None = None
        self._gathering: list[_Gathering] = []

    def slots(self, bucket: torch.Tensor, extra: int = 0) -> list[torch.Tensor]:
        """Return memory for this rank's nodes, padded so that all shares have one size."""
        size = bucket.numel() + extra
        share = -(-size // self._forest.size)
        memory = bucket.new_zeros((self._forest.own, share * self._forest.size))
        return [memory[i, :size] for i in range(self._forest.own)]

    def start(self, slots: list[torch.Tensor], *, last: bool, place: int = 0) -> Sum:
        """Begin to sum `slots` over all ranks, and return the sum's future."""
        future: Sum = _future_on(slots[0].device)
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
        received = outgoing.new_empty(sum(self._forest.counts) * share)
        work = dist.all_to_all_single(
            received,
            outgoing,
            output_split_sizes=[count * share for count in self._forest.counts],
            input_split_sizes=[own * share] * size,
            group=self._group,
            async_op=True,
        )
        assert work is not None
        return _Pending(work, received.view(-1, share), future, numel)

    def _sum_pending(self) -> None:
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        pending.work.wait()
        part = self._forest.sum_in_place(list(pending.received))
        total = part.new_empty(part.numel() * self._forest.size)
        work = _all_gather(total, part, group=self._group, async_op=True)
        assert work is not None
        self._gathering.append(_Gathering(work, total, pending.future, pending.numel))

    def _finish(self) -> None:
        gathering, self._gathering = self._gathering, []
        for item in gathering:
            item.work.wait()
            item.future.set_result(item.total[: item.numel])

    def close(self) -> None:
        """Give back nothing: the group belongs to the run."""


#: torch 2.13 has renamed it, and warns about the name that torch 2.11 has.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _future_on(device: torch.device) -> Sum:
    if device.type == "cpu":
        return torch.futures.Future()
    return torch.futures.Future(devices=[device])
