"""Exchange `shared-memory`: sums in the order of the reduction tree, in memory that a host's ranks share.

Every rank writes its nodes (sums over its replicas) to memory that all ranks of the host can read, adds its
share of all nodes in place, and reads the sum, which lies in the first node of the host's first rank. With
several hosts (exchange `tree`), a rank adds its share as far as the tree allows, and another exchange sums
the results over the hosts. The memory is anonymous (memfd), so that nothing is left behind however the
processes end, and containers' limits on /dev/shm don't matter.

With one host, each rank adds all elements of a bucket of at most 128 KiB by itself.

No thread is started: a bucket that is not the last advances as far as possible without waiting, and the
last bucket waits for all. On CPUs the additions are the ranks' own work in any case.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lockstep.engine.exchange.base import Exchange, ExchangeContext, Forest, Sum, future_on
from lockstep.engine.exchange.peers import SUMMED, WRITTEN, PeerSockets
from lockstep.engine.layout.replicas import share
from lockstep.errors import UsageError

#: Bytes that strategies write behind the last bucket, besides one element per parameter.
_NOTES = 256
_ALIGNMENT = 64  # a cache line, so that no two ranks write to one
_SMALL = 1 << 17  # bytes up to which a sum by every rank for itself beats a second round of signals


@dataclass(frozen=True, slots=True)
class _Views:
    """Tensors in shared memory that belong to a bucket; they are the same in every second backward pass.

    Attributes:
        slots: this rank's partial sums.
        parts: the elements that this rank adds, of each partial sum of the host's ranks.
        total: the first partial sum of the first rank, in which the sums of large buckets lie at the end.
    """

    slots: list[torch.Tensor]
    parts: list[torch.Tensor]
    total: torch.Tensor


@dataclass(slots=True)
class _Bucket:
    """A bucket (a flat tensor of gradients) that is being summed.

    Attributes:
        number: number of the bucket, counted from 1 since the exchange was made.
        bytes: number of their bytes.
        views: its tensors in shared memory.
        future: future of the total over all ranks.
        place: number of the batch whose gradients are summed.
        last: whether it is the last bucket of a backward pass.
        summed: the total of a small bucket, of which each rank adds all elements itself; `None` for
            a larger bucket, of which each rank adds a share.
        across: future of the sum of this rank's share over all hosts; `None` once the sum is in
            shared memory.
    """

    number: int
    bytes: int
    views: _Views
    future: Sum
    place: int = 0
    last: bool = False
    summed: torch.Tensor | None = None
    across: Sum | None = None


class SharedMemoryExchange(Exchange):
    """All-reduce with exact sums between CPU ranks of one host; with `across`, of several hosts.

    Args:
        name: name of the connections between ranks; the same on all ranks, and used once.
        capacity: bytes of all gradients of one backward pass.
        buckets: the highest number of buckets of one backward pass.
        hosts: the ranks of each host; empty if one host has all ranks.
        across: exchange that sums this rank's share of a bucket over all hosts; `None` on a single
            host, and for a rank without a share.
    """

    def __init__(
        self,
        store: dist.Store,
        name: str,
        forest: Forest,
        *,
        capacity: int,
        buckets: int,
        hosts: Sequence[range] = (),
        across: Exchange | None = None,
    ) -> None:
        hosts = hosts or [range(forest.size)]
        (ranks,) = (host for host in hosts if forest.rank in host)
        self._forest = forest.within(ranks)
        self._shares, self._across = shares_of(hosts), across
        self._small = _SMALL if len(hosts) == 1 else -1
        self._moved = 0
        self._stride = _aligned(capacity + buckets * _ALIGNMENT)
        self._peers = PeerSockets(store, f"{name}/{ranks.start}", forest.rank, ranks)
        self._memories = self._share_memory()
        self._views: dict[tuple[int, int, int, torch.dtype], _Views] = {}
        self._offset = 0
        self._half = 0
        self._number = 0
        self._announced: _Bucket | None = None
        self._written: deque[_Bucket] = deque()
        self._waiting: deque[_Bucket] = deque()

    @property
    def sent(self) -> int | None:
        """Bytes that this rank has sent to other hosts; on one host, bytes written to shared memory."""
        if self._small >= 0:
            return self._moved
        return 0 if self._across is None else self._across.sent

    def _share_memory(self) -> list[mmap.mmap]:
        # Two halves: while a slow peer still reads the sums of one pass, the next goes to the other.
        descriptor = os.memfd_create("lockstep-gradients", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, 2 * self._forest.own * self._stride)
        descriptors = self._peers.exchange_descriptors(descriptor)
        os.close(descriptor)
        memories = []
        for count, other in zip(self._forest.counts, descriptors, strict=True):
            memories.append(mmap.mmap(other, 2 * count * self._stride))
            os.close(other)
        return memories

    def _views_at(self, offset: int, numel: int, dtype: torch.dtype) -> _Views:
        """Return the tensors of a bucket in the current half of the memory.

        `offset`: position in bytes of the bucket's elements in each rank's memory.
        """
        key = self._half, offset, numel, dtype
        if (views := self._views.get(key)) is not None:
            return views
        nodes = []
        for memory, count in zip(self._memories, self._forest.counts, strict=True):
            first = self._half * count
            places = [offset + node * self._stride for node in range(first, first + count)]
            nodes.append(
                [torch.frombuffer(memory, dtype=dtype, count=numel, offset=p) for p in places]
            )
        part = self._part(numel, numel * dtype.itemsize)
        parts = [node[part.start : part.stop] for own in nodes for node in own]
        views = self._views[key] = _Views(nodes[self._forest.rank], parts, nodes[0][0])
        return views

    def _part(self, numel: int, size: int) -> range:
        """Return the range of a bucket's elements that this rank adds; it may be empty.

        `size`: the bytes of the bucket's `numel` elements. Of a small bucket each rank adds all elements.
        """
        if size <= self._small:
            return range(numel)
        if self._forest.rank >= self._shares:
            return range(0)
        return share(numel, self._shares, self._forest.rank)

    def slots(self, bucket: torch.Tensor, extra: int = 0) -> list[torch.Tensor]:
        """Return tensors in shared memory, which the caller fills with this rank's partial sums.

        Each tensor is `extra` elements longer than `bucket`.
        """
        self._number += 1
        numel, offset, future = bucket.numel() + extra, self._offset, future_on(bucket.device)
        size = numel * bucket.dtype.itemsize
        assert offset + size <= self._stride, "more gradients than parameters"
        self._offset = _aligned(offset + size)
        views = self._views_at(offset, numel, bucket.dtype)
        self._announced = _Bucket(self._number, size, views, future)
        return views.slots

    def start(self, slots: list[torch.Tensor], *, last: bool, place: int = 0) -> Sum:
        """Begin to add `slots`, this rank's partial sums, over all ranks; return a future of the total.

        `last` and `place` are as in `Exchange.start`.
        """
        bucket, self._announced = self._announced, None
        assert bucket is not None, "start() without slots()"
        bucket.place, bucket.last = place, last
        self._moved += bucket.bytes * self._forest.own
        self._peers.signal(WRITTEN, bucket.number, place)
        self._written.append(bucket)
        self._advance(wait=last)
        if last:
            self._offset = 0
            self._half = 1 - self._half
        return bucket.future

    def _advance(self, *, wait: bool) -> None:
        while self._written and self._peers.all_signalled(
            WRITTEN, self._written[0].number, wait=wait
        ):
            bucket = self._written.popleft()
            self._peers.check_place(bucket.number, bucket.place)
            self._sum(bucket)
            self._waiting.append(bucket)
        if wait:
            self._write_sums()
        while self._waiting and self._is_summed(self._waiting[0], wait=wait):
            bucket = self._waiting.popleft()
            total = bucket.views.total if bucket.summed is None else bucket.summed
            bucket.future.set_result(total)

    def _sum(self, bucket: _Bucket) -> None:
        parts = bucket.views.parts
        if bucket.bytes <= self._small:
            bucket.summed = self._forest.sum(parts)
            return
        nodes = self._forest.fold_in_place(parts)
        self._moved += parts[0].nbytes
        if self._across is None:
            self._peers.signal(SUMMED, bucket.number)
            return
        bucket.across = self._across.add(nodes, last=bucket.last)

    def _is_summed(self, bucket: _Bucket, *, wait: bool) -> bool:
        if bucket.summed is not None:
            return True
        if bucket.across is not None:
            return False
        return self._peers.all_signalled(SUMMED, bucket.number, wait=wait)

    def _write_sums(self) -> None:
        """Wait for the sums over hosts of this rank's shares; write them to shared memory."""
        for bucket in self._waiting:
            if bucket.across is not None:
                bucket.views.parts[0].copy_(bucket.across.wait())
                bucket.across = None
                self._peers.signal(SUMMED, bucket.number)

    def close(self) -> None:
        """Close the sockets and the shared memory, which is freed with the last tensor in it."""
        self._peers.close()
        self._views.clear()
        self._memories.clear()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def shares_of(hosts: Sequence[range]) -> int:
    """Return the number of shares that a bucket is cut into: the rank count of the smallest host."""
    return min(map(len, hosts))


def build(
    context: ExchangeContext, hosts: Sequence[range] = (), across: Exchange | None = None
) -> SharedMemoryExchange:
    """Return a `SharedMemoryExchange` with memory for the gradients of the parameters in `context`.

    `hosts` and `across` are arguments of `SharedMemoryExchange`.
    """
    parameters = context.parameters
    size = sum((parameter.numel() + 1) * parameter.element_size() for parameter in parameters)
    return SharedMemoryExchange(
        context.store,
        context.key,
        context.forest,
        capacity=size + _NOTES,
        buckets=len(parameters) + 1,
        hosts=hosts,
        across=across,
    )


def check(forest: Forest, *, one_host: bool, device: str) -> None:
    """Raise an error unless all ranks are on CPUs of one host, and so can share memory.

    Raises:
        UsageError: for ranks on several hosts, or on GPUs.
    """
    if not one_host or device != "cpu":
        raise UsageError(
            f"exchange=shared-memory with {device if one_host else 'ranks on several hosts'}; "
            "expected ranks on the CPUs of one host",
            hint="exchange='tree' works everywhere",
        )
