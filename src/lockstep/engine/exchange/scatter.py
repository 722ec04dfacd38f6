"""Reduce-scatter in tree order: each rank gets the sum of its own share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lockstep.engine.exchange.base import Forest
from lockstep.engine.exchange.tree import GroupWire, Work, all_gather
from lockstep.world.groups import keep
from lockstep.world.rendezvous.store import TIMEOUT


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to all ranks that is filled before it is sent.

    Attributes:
        nodes: for each of this rank's nodes one row of it per receiver, of shape `(ranks, share)`.
        notes: one row per receiver, of shape `(ranks, notes)`.
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
        """Whether `finish` would not wait, as far as this rank can tell."""
        return isinstance(self._work, dist.Work) and self._work.is_completed()

    def finish(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Wait; return this rank's share of the sum, and the notes of all ranks, one row each."""
        self._work.wait()
        width = self._sent.notes.shape[1]
        parts, notes, offset = [], [], 0
        for count in self._forest.counts:
            end = offset + count * self._share
            parts += list(self._received[offset:end].view(count, self._share))
            notes.append(self._received[end : end + width])
            offset = end + width
        # A copy: gradients that look into the message would keep all of it.
        total = self._forest.sum_in_place(parts).clone()
        return total, torch.stack(notes)


class TreeScatter:
    """Each rank receives its share of all nodes, and sums them in tree order.

    Half of what `TreeExchange` does: as much goes over the wire as in a ring reduce-scatter when
    every rank has one node.

    Args:
        group: the process group; of its own, so that its messages need no order among those of others.
    """

    def __init__(self, group: dist.ProcessGroup, forest: Forest) -> None:
        self._wire = GroupWire(group)
        self._forest = forest

    def memory(self, like: torch.Tensor, share: int, notes: int) -> Outgoing:
        """Return memory for this rank's nodes and for `notes` elements that go with them.

        `share`: how many elements of a node each rank receives. `notes`: how many elements of its own
        this rank sends to each rank.
        """
        size, own = self._forest.size, self._forest.own
        whole = like.new_empty(size, own * share + notes)
        nodes = [whole[:, i * share : (i + 1) * share] for i in range(own)]
        return Outgoing(nodes, whole[:, own * share :], whole)

    def start(self, outgoing: Outgoing) -> Scattering:
        """Send a filled message; all ranks send the same ones in the same order."""
        width = outgoing.notes.shape[1]
        share = (outgoing.whole.shape[1] - width) // self._forest.own
        shares = [count * share + width for count in self._forest.counts]
        received = outgoing.whole.new_empty(sum(shares))
        work = self._wire.scatter(outgoing.whole.view(-1), received, shares)
        return Scattering(work, outgoing, received, self._forest, share)


def gather_numbers(numbers: Sequence[int], group: dist.ProcessGroup) -> list[list[int]]:
    """Return the numbers of each rank of `group`; all of them call this together."""
    # On the CPU: groups for GPUs have a backend for it, too (world/connect.py).
    gathered = torch.empty(dist.get_world_size(group) * len(numbers), dtype=torch.int64)
    all_gather(gathered, torch.tensor(numbers), group=group)
    found: list[list[int]] = gathered.view(-1, len(numbers)).tolist()
    return found


def gather_texts(text: bytes, room: int, group: dist.ProcessGroup) -> list[bytes]:
    """Return the text of each rank of `group`, at most `room` bytes; all of them call this together."""
    own = torch.frombuffer(bytearray(text[:room].ljust(room, b"\0")), dtype=torch.uint8)
    texts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(texts, own, group=group)
    return [row.numpy().tobytes().rstrip(b"\0") for row in texts]


def clone_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Return a new process group of the same ranks; all of them call this together."""
    made: dist.ProcessGroup = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=TIMEOUT,
        backend=dist.get_backend_config(group),
    )
    keep(made)
    return made
