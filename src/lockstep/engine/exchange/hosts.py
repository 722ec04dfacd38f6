"""Exchange `tree` over several hosts: gradients are summed within each host first, then between hosts.

The ranks of a host sum gradients of their replicas as far as the reduction tree allows, in shared memory
(`shared_memory.py`). A bucket is cut into as many shares as the smallest host has ranks. The i-th ranks of
all hosts then sum the i-th share (`tree.py`): 2 (H - 1) messages per rank and bucket for H hosts, or 2
log2(H) for 8 hosts and more whose replicas are equal subtrees (`halving.py`). The additions are those of
the tree over replicas, so the sum has the same bits as on one rank.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from lockstep.engine.exchange import shared_memory
from lockstep.engine.exchange.base import Exchange, ExchangeContext
from lockstep.engine.exchange.halving import HalvingExchange
from lockstep.engine.exchange.scatter import gather_numbers
from lockstep.engine.exchange.tree import GroupWire, TreeExchange
from lockstep.engine.layout import halving
from lockstep.world import accelerator, host

#: Tag of the messages between hosts, far from 0, where the tags of a script's own messages are.
_TAG = 19_539


@dataclass(frozen=True, slots=True)
class _Messages:
    """Messages that are being sent and received; keeps their tensors alive until `wait` returns."""

    works: list[dist.Work | None]
    tensors: Sequence[object]

    def wait(self) -> None:
        """Wait until all messages have been sent and received."""
        for work in self.works:
            assert work is not None, "this rank belongs to the group"
            work.wait()


class MessageWire:
    """All-to-all and all-gather among some ranks of a process group, made of point-to-point messages.

    Messages between two ranks arrive in the order in which they are sent, so all of them have one tag.

    Args:
        ranks: the ranks of `group` that take part, one of each host.
        own: index of this rank in `ranks`.
    """

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], own: int) -> None:
        self._group, self._ranks, self._own = group, ranks, own
        # From the next one on, so that first peers differ.
        places = [(own + step) % len(ranks) for step in range(1, len(ranks))]
        self._others = [(place, ranks[place]) for place in places]

    def scatter(
        self, outgoing: torch.Tensor, received: torch.Tensor, shares: Sequence[int]
    ) -> _Messages:
        """Begin an all-to-all: each rank receives one part of the `outgoing` tensor of every rank.

        The arguments are those of `Wire.scatter`.
        """
        return self._swap_all(outgoing.chunk(len(shares)), received.split_with_sizes(list(shares)))

    def gather(self, part: torch.Tensor, total: torch.Tensor) -> _Messages:
        """Begin an all-gather: the `part` of every rank is written to `total`, in rank order."""
        size = len(self._others) + 1
        return self._swap_all([part] * size, total.chunk(size))

    def swap(self, other: int, outgoing: torch.Tensor, incoming: torch.Tensor) -> _Messages:
        """Begin to send `outgoing` to rank `ranks[other]`, and to receive `incoming` from it."""
        return self._begin([(self._ranks[other], outgoing, incoming)])

    def _swap_all(
        self, outgoing: Sequence[torch.Tensor], incoming: Sequence[torch.Tensor]
    ) -> _Messages:
        messages = self._begin([(rank, outgoing[i], incoming[i]) for i, rank in self._others])
        incoming[self._own].copy_(outgoing[self._own])
        return messages

    def _begin(self, pairs: Sequence[tuple[int, torch.Tensor, torch.Tensor]]) -> _Messages:
        works = [
            dist.irecv(incoming, group=self._group, group_src=rank, tag=_TAG)
            for rank, _, incoming in pairs
        ]
        works += [
            dist.isend(outgoing, group=self._group, group_dst=rank, tag=_TAG)
            for rank, outgoing, _ in pairs
        ]
        return _Messages(works, pairs)


def find_hosts(group: dist.ProcessGroup) -> list[range]:
    """Return the ranks of each host, as ranges of neighbouring ranks; all ranks call this together.

    Ranks of different users count as different hosts. If shared memory is refused to any rank of the group,
    each rank counts as a host of its own.
    """
    numbers = [number for (number,) in gather_numbers([_host_number()], group)]
    if _REFUSED in numbers:
        return [range(rank, rank + 1) for rank in range(len(numbers))]
    found, start = [], 0
    for _, same in itertools.groupby(numbers):
        count = len(list(same))
        found.append(range(start, start + count))
        start += count
    return found


_REFUSED = 0


def _host_number() -> int:
    """Return a number that is equal on ranks that can share memory; 0 if this process cannot share any."""
    try:
        os.close(os.memfd_create("lockstep-probe", os.MFD_CLOEXEC))
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).close()
    except OSError as error:
        sys.stderr.write(
            f"lockstep: warning: {host.name()} refuses shared memory ({error.strerror}): each rank sends "
            "its gradients over the network, which takes longer\n"
        )
        return _REFUSED
    users = os.stat("/proc/self/ns/user").st_ino  # noqa: PTH116 - not a file but a link's target
    text = f"{host.identity()}/{users}/{os.geteuid()}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") + 1


def build(context: ExchangeContext) -> Exchange:
    """Return the exchange `tree`, which sums gradients within each host first, then between hosts.

    On one host, with one rank per host, or on accelerators, there is a single sum over all ranks of the
    process group. On CPUs, sums over 8 hosts and more whose replicas are equal subtrees use recursive
    halving (`halving.py`).
    """
    forest, group = context.forest, context.group
    if forest.size > 2 and not any(map(accelerator.holds, context.parameters)):
        hosts = find_hosts(group)
        if 1 < len(hosts) < forest.size:
            return shared_memory.build(context, hosts, _across(context, hosts))
        if len(hosts) == forest.size and halving.pays(forest.blocks, forest.replicas):
            return HalvingExchange(MessageWire(group, range(forest.size), forest.rank), forest)
    return TreeExchange(GroupWire(group), forest)


def _across(context: ExchangeContext, hosts: Sequence[range]) -> Exchange | None:
    """Return the exchange that sums this rank's share of buckets over hosts, or `None`.

    `hosts`: the ranks of each host. The i-th ranks of all hosts have the i-th share. A rank beyond the rank
    count of the smallest host has no share; for it the result is `None`.
    """
    between = context.forest.between(hosts)
    share = context.forest.rank - hosts[between.rank].start
    if share >= shared_memory.shares_of(hosts):
        return None
    ranks = [ranks[share] for ranks in hosts]
    wire = MessageWire(context.group, ranks, between.rank)
    pays = halving.pays(between.blocks, between.replicas)
    return (HalvingExchange if pays else TreeExchange)(wire, between)
