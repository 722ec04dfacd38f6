"""`Exchange`, the base class of all exchanges, and `Forest`, the tree nodes of all ranks."""

from __future__ import annotations

import abc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist

from lockstep.engine.layout.replicas import block
from lockstep.engine.layout.tree import fold, merges, nodes
from lockstep.world import accelerator

Sum = torch.futures.Future[torch.Tensor]


def future_on(device: torch.device) -> Sum:
    """Return the future of a sum that will be on `device`."""
    return torch.futures.Future(devices=None if device.type == "cpu" else [device])


def done(value: torch.Tensor) -> Sum:
    """Return a future that has `value`."""
    future: Sum = torch.futures.Future(devices=[value.device] if accelerator.holds(value) else None)
    future.set_result(value)
    return future


@dataclass(frozen=True, slots=True)
class Forest:
    """The maximal tree nodes of each rank, and the merges that reduce them to the root.

    Attributes:
        counts: number of nodes of each rank, in rank order.
        merges: how many merges follow each node, when all nodes are pushed in rank order.
    """

    rank: int
    counts: tuple[int, ...]
    merges: tuple[int, ...]

    @staticmethod
    def of(replicas: int, size: int, rank: int) -> Forest:
        """Return the forest of `replicas` replicas over `size` ranks, as `rank` sees it."""
        per_rank = [nodes(block(replicas, size, other), replicas) for other in range(size)]
        counts, _ = merges([node for own in per_rank for node in own], replicas)
        return Forest(rank, tuple(len(own) for own in per_rank), tuple(counts))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.counts)

    @property
    def own(self) -> int:
        """Number of nodes of this rank."""
        return self.counts[self.rank]

    def sum(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the sum of the nodes of all ranks, given in rank order, and change none of them."""
        (root,) = fold(parts, self.merges, torch.add)
        return root

    def sum_in_place(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Add the nodes of all ranks, given in rank order, into the first of them, and return it."""
        (root,) = fold(parts, self.merges, torch.Tensor.add_)
        return root


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeContext:
    """The arguments of a function that builds an exchange.

    Attributes:
        group: the ranks.
        key: used once per run.
        settings: those keywords of `run.model` that the entry of the exchange names.
    """

    name: str
    forest: Forest
    parameters: Sequence[torch.Tensor]
    group: dist.ProcessGroup
    store: dist.Store
    key: str
    settings: Mapping[str, Any] = field(default_factory=dict)


class Exchange(abc.ABC):
    """Sums one bucket of gradients at a time over all ranks.

    A bucket is announced by `slots`, which gives the memory for this rank's nodes; once they are
    filled, `start` begins the sum. After the last bucket of a backward pass all sums are complete.
    """

    name: str
    #: whether the sum has the same bits on every layout
    exact: bool

    @property
    def sent(self) -> int | None:
        """Bytes that this rank has sent; `None` where a library sends them and does not say."""
        return None

    @abc.abstractmethod
    def slots(self, bucket: torch.Tensor, extra: int = 0) -> list[torch.Tensor]:
        """Return memory for this rank's nodes.

        Args:
            bucket: a flat tensor of gradients, which the nodes are to be like.
            extra: how many elements longer than `bucket` they are to be.
        """

    @abc.abstractmethod
    def start(self, slots: list[torch.Tensor], *, last: bool, place: int = 0) -> Sum:
        """Begin to sum `slots` over all ranks, and return the sum's future.

        Args:
            slots: what `slots()` gave, filled.
            last: whether it is the last bucket of a backward pass.
            place: of the batch, the same on all ranks; compared where the entry of the exchange says so.

        Raises:
            PeerError: if another rank is gone, or in another call.
        """

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Close what the exchange has opened."""


@runtime_checkable
class Stateful(Protocol):
    """An exchange whose sums depend on those of earlier steps, and on the shapes of parameters."""

    name: str

    def announce(self, parameters: Sequence[torch.Tensor]) -> None:
        """Receive the parameters whose gradients are in the next bucket."""

    def state(self) -> Mapping[str, Any]:
        """Return the state to save; the same on all ranks."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Load what `state` returned."""
