"""Exchange `shared-memory`: the sum in tree order, in memory that the ranks of one host share.

Every rank writes its nodes where all can read them, sums its share of everyone's nodes in place, and
reads the result, which lies in the first node of rank 0. The memory is anonymous (memfd), so that
nothing is left behind however the processes end, and containers' limits on /dev/shm don't matter.

There is no thread: a bucket that is not the last advances as far as it can without waiting, and the
last one waits for all. On CPUs the summing is the ranks' own work in any case.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lockstep.engine.exchange.base import Exchange, ExchangeContext, Forest, Sum
from lockstep.engine.exchange.peers import SUMMED, WRITTEN, PeerSockets
from lockstep.engine.layout.replicas import share
from lockstep.errors import UsageError

#: Bytes of what strategies write behind the last bucket, besides an element per parameter.
_NOTES = 256
_ALIGNMENT = 64  # a cache line, so that no two ranks write to one
_SMALL = 1 << 17  # bytes up to which a sum by every rank for itself beats a second round of signals


@dataclass(slots=True)
class _Bucket:
    """A bucket that is being summed: offset and size of its nodes in each rank's memory."""

    number: int
    offset: int
    numel: int
    dtype: torch.dtype
    half: int
    future: Sum
    place: int = 0
    summed: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        """Size of one node."""
        return self.numel * self.dtype.itemsize

    @property
    def small(self) -> bool:
        """Whether every rank sums all of it."""
        return self.bytes <= _SMALL


class SharedMemoryExchange(Exchange):
    """The exchange between the ranks of one host, on CPU.

    Args:
        name: the same on all ranks, and used once.
        capacity: bytes of all gradients of one backward pass.
        buckets: the most buckets they may come in.
    """

    name = "shared-memory"
    exact = True
    sent = 0

    def __init__(
        self, store: dist.Store, name: str, forest: Forest, *, capacity: int, buckets: int
    ) -> None:
        self._forest = forest
        self._stride = _aligned(capacity + buckets * _ALIGNMENT)
        self._peers = PeerSockets(store, name, forest.rank, forest.size)
        self._memories = self._share_memory()
        self._offset = 0
        self._half = 0
        self._number = 0
        self._announced: _Bucket | None = None
        self._written: deque[_Bucket] = deque()
        self._waiting: deque[_Bucket] = deque()

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

    def _node(self, bucket: _Bucket, rank: int, node: int) -> torch.Tensor:
        place = bucket.half * self._forest.counts[rank] + node
        return torch.frombuffer(
            self._memories[rank],
            dtype=bucket.dtype,
            count=bucket.numel,
            offset=place * self._stride + bucket.offset,
        )

    def _nodes(self, bucket: _Bucket, part: range) -> list[torch.Tensor]:
        """All ranks' nodes of a bucket, in rank order, cut to the elements in `part`."""
        return [
            self._node(bucket, rank, node)[part.start : part.stop]
            for rank, count in enumerate(self._forest.counts)
            for node in range(count)
        ]

    def slots(self, bucket: torch.Tensor, extra: int = 0) -> list[torch.Tensor]:
        """Return this rank's nodes in the shared memory."""
        self._number += 1
        numel, future = bucket.numel() + extra, torch.futures.Future[torch.Tensor]()
        announced = _Bucket(self._number, self._offset, numel, bucket.dtype, self._half, future)
        assert announced.offset + announced.bytes <= self._stride, "more gradients than parameters"
        self._offset = _aligned(announced.offset + announced.bytes)
        self._announced = announced
        rank = self._forest.rank
        return [self._node(announced, rank, node) for node in range(self._forest.own)]

    def start(self, slots: list[torch.Tensor], *, last: bool, place: int = 0) -> Sum:
        """Begin to sum the slots over all ranks, and return the sum's future."""
        bucket, self._announced = self._announced, None
        assert bucket is not None, "start() without slots()"
        bucket.place = place
        self.sent += bucket.bytes * self._forest.own
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
        while self._waiting and (
            self._waiting[0].small
            or self._peers.all_signalled(SUMMED, self._waiting[0].number, wait=wait)
        ):
            bucket = self._waiting.popleft()
            total = self._node(bucket, 0, 0) if bucket.summed is None else bucket.summed
            bucket.future.set_result(total)

    def _sum(self, bucket: _Bucket) -> None:
        if bucket.small:
            bucket.summed = self._forest.sum(self._nodes(bucket, range(bucket.numel)))
            return
        part = share(bucket.numel, self._forest.size, self._forest.rank)
        self._forest.sum_in_place(self._nodes(bucket, part))
        self.sent += len(part) * bucket.dtype.itemsize
        self._peers.signal(SUMMED, bucket.number)

    def close(self) -> None:
        """Close the connections and the memory, which is freed with the last tensor in it."""
        self._peers.close()
        self._memories.clear()


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def build(context: ExchangeContext) -> SharedMemoryExchange:
    """Return the exchange between the ranks of this host."""
    parameters = context.parameters
    size = sum((parameter.numel() + 1) * parameter.element_size() for parameter in parameters)
    buckets = len(parameters) + 1
    return SharedMemoryExchange(
        context.store, context.key, context.forest, capacity=size + _NOTES, buckets=buckets
    )


def check(forest: Forest, *, one_host: bool, device: str) -> None:
    """Refuse ranks that share no memory.

    Raises:
        UsageError: for ranks on several hosts, or on GPUs.
    """
    if not one_host or device != "cpu":
        raise UsageError(
            f"exchange=shared-memory with {device if one_host else 'ranks on several hosts'}; "
            "expected ranks on the CPUs of one host",
            hint="exchange='tree' works everywhere",
        )
