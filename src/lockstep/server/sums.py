"""The sums of a room: one per bucket, in the order of the tree, as soon as all workers' nodes are there."""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.exchange.base import Forest
from lockstep.exchange.frames import DTYPES, Kind
from lockstep.server.connection import Connection, Frame
from lockstep.server.memory import Lease, Pool


@dataclass(frozen=True, slots=True)
class _Part:
    """One worker's nodes of a bucket."""

    connection: Connection
    frame: Frame


class DifferError(Exception):
    """Workers that do not send nodes of the same bucket."""


class Sums:
    """Adds what workers send.

    Args:
        forest: the workers' nodes.
        pool: where their memory comes from.
    """

    def __init__(self, forest: Forest, pool: Pool) -> None:
        self._forest = forest
        self._pool = pool
        self._buckets: dict[int, dict[int, _Part]] = {}

    @property
    def waits(self) -> bool:
        """Whether some workers wait for others."""
        return bool(self._buckets)

    def push(self, connection: Connection, frame: Frame) -> None:
        """Take one worker's nodes; send all of them the sum, if these were the last.

        Raises:
            DifferError: if workers do not send nodes of the same bucket.
        """
        bucket = self._buckets.setdefault(frame.header.number, {})
        bucket[connection.rank] = _Part(connection, frame)
        if len(bucket) < self._forest.size:
            return
        del self._buckets[frame.header.number]
        parts = [bucket[rank] for rank in range(self._forest.size)]
        self._check(parts)
        self._answer(parts)

    def _check(self, parts: list[_Part]) -> None:
        first = parts[0].frame.header
        size = first.payload // self._forest.counts[0]
        for part, count in zip(parts, self._forest.counts, strict=True):
            header = part.frame.header
            if header.place != first.place:
                raise DifferError(
                    f"rank {part.connection.rank} computes gradients of another batch than rank 0"
                )
            if (header.tag, header.payload) != (first.tag, count * size):
                raise DifferError(
                    f"rank {part.connection.rank} sends {header.payload} bytes of a bucket; "
                    f"expected {count * size}, as rank 0 has them"
                )

    def _answer(self, parts: list[_Part]) -> None:
        dtype = DTYPES[parts[0].frame.header.tag]
        nodes = [
            node
            for part, count in zip(parts, self._forest.counts, strict=True)
            for node in part.frame.payload.view(dtype).view(count, -1)
        ]
        total = self._forest.sum_in_place(nodes)
        first, *others = (part.frame.payload for part in parts)
        for memory in others:
            self._pool.give(memory)
        assert total.data_ptr() == first.data_ptr(), "the sum is in the first worker's memory"
        lease = Lease(self._pool, first, len(parts))
        number = parts[0].frame.header.number
        for part in parts:
            part.connection.send(Kind.SUM, [total], lease=lease, number=number)
