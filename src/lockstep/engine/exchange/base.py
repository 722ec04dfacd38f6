"""`Exchange`: base class of methods that sum gradients over ranks; `Forest`: the order of additions."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from lockstep.engine.exchange.scratch import Scratch
from lockstep.engine.layout.replicas import block
from lockstep.engine.layout.tree import fold, merges, nodes
from lockstep.world import accelerator

Sum = torch.futures.Future[torch.Tensor]


def future_on(device: torch.device) -> Sum:
    """Return a new, uncompleted future whose result will be a tensor on `device`."""
    return torch.futures.Future(devices=None if device.type == "cpu" else [device])


def done(value: torch.Tensor) -> Sum:
    """Return a completed future with the result `value`."""
    future: Sum = torch.futures.Future(devices=[value.device] if accelerator.holds(value) else None)
    future.set_result(value)
    return future


@dataclass(frozen=True, slots=True)
class Forest:
    """Order in which gradients of all replicas are added: first within each rank, then over ranks.

    A binary tree over replicas (reduction tree) fixes the order. A rank adds the gradients of its replicas
    as far as the tree allows: one partial sum for each maximal node, which is a largest subtree with
    replicas of this rank alone.

    Attributes:
        counts: number of maximal nodes of each rank, in rank order.
        merges: how to add the partial sums of all ranks. The sums are pushed on a stack in rank
            order; after the i-th push the two topmost entries are replaced by their sum,
            `merges[i]` times.
        blocks: the replicas of each rank, in rank order.
        replicas: number of replicas of the run.
    """

    rank: int
    counts: tuple[int, ...]
    merges: tuple[int, ...]
    blocks: tuple[range, ...]
    replicas: int

    @staticmethod
    def of(replicas: int, size: int, rank: int) -> Forest:
        """Return the `Forest` (order of additions) for rank `rank` of `size` ranks.

        Each rank hosts a contiguous block of the run's `replicas` replicas.
        """
        return Forest.over([block(replicas, size, other) for other in range(size)], replicas, rank)

    @staticmethod
    def over(blocks: Iterable[range], replicas: int, rank: int) -> Forest:
        """Return rank `rank`'s `Forest` (order of additions) if rank i hosts the replicas `blocks[i]`."""
        blocks = tuple(blocks)
        per_rank = [nodes(own, replicas) for own in blocks]
        counts, _ = merges([node for own in per_rank for node in own], replicas)
        return Forest(rank, tuple(map(len, per_rank)), tuple(counts), blocks, replicas)

    def within(self, ranks: range) -> Forest:
        """Return the `Forest` (order of additions) for sums over some of the ranks.

        `ranks`: the ranks to sum over; this rank is one of them.
        """
        return Forest.over(
            self.blocks[ranks.start : ranks.stop], self.replicas, self.rank - ranks.start
        )

    def between(self, hosts: Sequence[range]) -> Forest:
        """Return the `Forest` (order of additions) in which each host counts as one rank.

        `hosts`: the ranks of each host. A host counts as one rank that has the replicas of all its ranks.
        """
        blocks = [range(self.blocks[h[0]].start, self.blocks[h[-1]].stop) for h in hosts]
        (own,) = (number for number, host in enumerate(hosts) if self.rank in host)
        return Forest.over(blocks, self.replicas, own)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.counts)

    @property
    def own(self) -> int:
        """Number of partial gradient sums (maximal nodes) that this rank contributes to a sum."""
        return self.counts[self.rank]

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the total of `parts`, all ranks' partial sums in rank order; leave `parts` unchanged."""
        (root,) = fold(parts, self.merges, torch.add)
        return root

    def sum_in_place(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add `parts`, all ranks' partial sums in rank order, in place; return the total."""
        (root,) = self.fold_in_place(parts)
        return root

    def fold_in_place(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Add `parts` in place, as far as the reduction tree allows; return the results.

        `parts`: the partial sums of all ranks of this forest, in rank order. There are several results if
        the order of additions needs a sum of a rank outside this forest.
        """
        return fold(parts, self.merges, torch.Tensor.add_)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeContext:
    """Arguments for building an exchange, an object that sums gradients over ranks.

    Attributes:
        name: name of the exchange in the registry, such as `tree`.
        parameters: the parameters whose gradients are summed.
        group: process group of the ranks over which gradients are summed.
        store: the run's key-value store.
        key: unique name of the exchange within the run, for keys in the store.
        settings: keyword arguments of `run.model`; an exchange gets those that the registry lists for it.
    """

    name: str
    forest: Forest
    parameters: Sequence[torch.Tensor]
    group: dist.ProcessGroup
    store: dist.Store
    key: str
    settings: Mapping[str, Any] = field(default_factory=dict)


class Exchange(abc.ABC):
    """Base class of exchanges, which sum one bucket (flat tensor) of gradients at a time over all ranks.

    For each bucket, `slots` returns memory for this rank's tree nodes (sums over its replicas). The caller
    fills the memory, and `start` begins the sum. After the last bucket of a backward pass all sums are
    complete.
    """

    @property
    def sent(self) -> int | None:
        """Number of bytes that this rank has sent; `None` if a library sends them without a count."""
        return None

    @abc.abstractmethod
    def slots(self, bucket: torch.Tensor, extra: int = 0) -> list[torch.Tensor]:
        """Return flat tensors that the caller fills with this rank's partial sums (over its replicas).

        Args:
            bucket: a flat tensor of gradients; each returned tensor has its size, type and device.
            extra: number of additional elements at the end of each returned tensor.
        """

    @abc.abstractmethod
    def start(self, slots: list[torch.Tensor], *, last: bool, place: int = 0) -> Sum:
        """Begin to add `slots`, this rank's partial sums, over all ranks; return a future of the total.

        Args:
            slots: the tensors that `slots()` returned, filled.
            last: whether this is the last bucket of a backward pass.
            place: number of the batch; some exchanges compare it between ranks
                (`compares_batches`).

        Raises:
            PeerError: if another rank has ended.
            MismatchError: if the exchange compares batches, and another rank sums gradients of
                another batch.
        """

    def add(self, nodes: Sequence[torch.Tensor], *, last: bool) -> Sum:
        """Begin to add `nodes`, this rank's partial sums, over all ranks; return a future of the total.

        The nodes are copied to `slots` first. `last` is as in `start`.
        """
        slots = self.slots(nodes[0])
        for slot, node in zip(slots, nodes, strict=True):
            if slot.data_ptr() != node.data_ptr():
                slot.copy_(node)
        return self.start(slots, last=last)

    def close(self) -> None:  # noqa: B027 - only some exchanges need it
        """Release the shared memory and connections of the exchange."""


class ScratchExchange(Exchange):
    """Base class of exchanges whose slots are memory that is reused in every backward pass.

    `divisor`: the memory behind each slot is padded to a multiple of this number of elements.
    """

    def __init__(self, forest: Forest, divisor: int = 1) -> None:
        self._forest, self._divisor = forest, divisor
        self._scratch = Scratch()

    def slots(self, bucket: torch.Tensor, extra: int = 0) -> list[torch.Tensor]:
        """Return tensors for this rank's partial sums, each `extra` elements longer than `bucket`.

        For a single sum that needs no `extra` elements and no padding, this is `bucket` itself.
        """
        size, own = bucket.numel() + extra, self._forest.own
        padded = self._padded(size)
        if own == 1 and padded == bucket.numel():
            return [bucket]
        memory = self._scratch.take(bucket, own * padded).view(own, padded)
        return [node[:size] for node in memory]

    def _padded(self, numel: int) -> int:
        """Return the next multiple of `divisor`; at least one, since backends refuse to send 0 elements."""
        return max(1, -(-numel // self._divisor)) * self._divisor


@runtime_checkable
class Stateful(Protocol):
    """Interface of exchanges (PowerSGD) whose sums depend on earlier steps and on parameters' shapes."""

    name: str

    def announce(self, parameters: Sequence[torch.Tensor]) -> None:
        """Set the parameters whose gradients are in the next bucket."""

    def state(self) -> Mapping[str, Any]:
        """Return the state of the exchange for checkpoints, equal on all ranks."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state that `state()` returned earlier, from a checkpoint."""
