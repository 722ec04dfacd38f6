"""Reduce-scatter with a fixed order of additions; all-gathers of vectors, integers and byte strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lockstep.engine.exchange.base import Forest
from lockstep.engine.exchange.tree import GroupWire, Work
from lockstep.world.groups import keep
from lockstep.world.rendezvous.store import TIMEOUT


@dataclass(frozen=True, slots=True)
class Outgoing:
    """Memory for a rank's messages to all ranks in a reduce-scatter.

    Attributes:
        nodes: for each of this rank's tree nodes (sums over its replicas), the shares of all ranks, of
            shape `(ranks, share)`.
        notes: additional elements for each rank, which are not summed, of shape `(ranks, notes)`.
        whole: the memory of all messages, of shape `(ranks, nodes * share + notes)`.
    """

    nodes: list[torch.Tensor]
    notes: torch.Tensor
    whole: torch.Tensor


class Scattering:
    """A reduce-scatter that has begun."""

    def __init__(
        self, work: Work, sent: Outgoing, received: torch.Tensor, forest: Forest, share: int
    ) -> None:
        self._work, self._sent, self._received = work, sent, received
        self._forest, self._share = forest, share

    @property
    def has_arrived(self) -> bool:
        """Whether all messages have been received, so that `finish` does not wait; `False` if unknown."""
        return isinstance(self._work, dist.Work) and self._work.is_completed()

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait for all messages; return this rank's share of the sum, and all additional elements.

        The additional elements (`Outgoing.notes`) are not summed: the second tensor has one row per rank.
        """
        self._work.wait()
        width = self._sent.notes.shape[1]
        parts, notes, offset = [], [], 0
        for count in self._forest.counts:
            end = offset + count * self._share
            parts += list(self._received[offset:end].view(count, self._share))
            notes.append(self._received[end : end + width])
            offset = end + width
        # Cloned: a view would keep the memory of all messages.
        total = self._forest.sum_in_place(parts).clone()
        return total, torch.stack(notes)


class TreeScatter:
    """Reduce-scatter with a fixed order of additions: each rank receives its share of the sum.

    If each rank has one tensor (the sum over its replicas), as many bytes are sent as in a ring
    reduce-scatter. `group` is used by this object alone, so that its collectives can run beside those of
    other process groups.
    """

    def __init__(self, group: dist.ProcessGroup, forest: Forest) -> None:
        self._wire = GroupWire(group)
        self._forest = forest

    def memory(self, like: torch.Tensor, share: int, notes: int) -> Outgoing:
        """Return memory for this rank's tree nodes (sums over its replicas) and for notes.

        Args:
            like: a tensor of the type and on the device of the memory.
            share: number of elements of a tree node that each rank receives.
            notes: number of additional elements for each rank, which are not summed.
        """
        size, own = self._forest.size, self._forest.own
        whole = like.new_empty(size, own * share + notes)
        nodes = [whole[:, i * share : (i + 1) * share] for i in range(own)]
        return Outgoing(nodes, whole[:, own * share :], whole)

    def start(self, outgoing: Outgoing) -> Scattering:
        """Begin the reduce-scatter of the filled `outgoing`; all ranks call this in the same order."""
        width = outgoing.notes.shape[1]
        share = (outgoing.whole.shape[1] - width) // self._forest.own
        shares = [count * share + width for count in self._forest.counts]
        received = outgoing.whole.new_empty(sum(shares))
        work = self._wire.scatter(outgoing.whole.view(-1), received, shares)
        return Scattering(work, outgoing, received, self._forest, share)


def gather_rows(row: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """All-gather one vector from each rank of `group`; return a matrix with one row per rank.

    All ranks of `group` call this together, with vectors of equal length and type.
    """
    rows = row.new_empty(dist.get_world_size(group) * row.numel())
    GroupWire(group).gather(row, rows).wait()
    return rows.view(-1, row.numel())


def gather_numbers(numbers: Sequence[int], group: dist.ProcessGroup) -> list[list[int]]:
    """All-gather `numbers` over the ranks of `group`; return one list per rank, in rank order.

    All ranks of `group` call this together, with equally many numbers.
    """
    # On the CPU: groups for GPUs have a CPU backend, too (world/connect.py).
    found: list[list[int]] = gather_rows(torch.tensor(numbers), group).tolist()
    return found


def gather_texts(text: bytes, room: int, group: dist.ProcessGroup) -> list[bytes]:
    """All-gather `text`, cut to `room` bytes, over the ranks of `group`; return one text per rank.

    All ranks of `group` call this together, with the same `room`. Zero bytes at the end of a text are lost.
    """
    own = torch.frombuffer(bytearray(text[:room].ljust(room, b"\0")), dtype=torch.uint8)
    return [row.numpy().tobytes().rstrip(b"\0") for row in gather_rows(own, group)]


def clone_group(group: dist.ProcessGroup, *, local: bool = False) -> dist.ProcessGroup:
    """Create a new process group with the ranks of `group`; all ranks call this together.

    With `local` only the ranks of `group` call it.
    """
    made: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=TIMEOUT,
        backend=dist.get_backend_config(group),
        use_local_synchronization=local,
    )
    keep(made)
    return made
