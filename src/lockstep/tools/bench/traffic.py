"""Messages and bytes of a sum of gradients over ranks, between hosts and within each host.

The numbers are arithmetic: they follow from the number of hosts, of ranks on each, and of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from lockstep.engine.layout import halving
from lockstep.engine.layout.replicas import block
from lockstep.engine.layout.tree import nodes
from lockstep.registry import EXCHANGES, STRATEGIES

SHARDED = STRATEGIES.where(lambda one: one.shards)
AT_SERVERS = EXCHANGES.where(lambda one: one.at_servers)


@dataclass(frozen=True, slots=True, order=True)
class Layout:
    """A number of hosts, each with the same number of ranks.

    Its text is in the syntax of `--project`: `8` on one host, `4x8` for 4 hosts of 8 ranks each.
    """

    hosts: int
    per_host: int

    @property
    def ranks(self) -> int:
        """Number of ranks on all hosts."""
        return self.hosts * self.per_host

    def __str__(self) -> str:
        return str(self.ranks) if self.hosts == 1 else f"{self.hosts}x{self.per_host}"


class ReduceAlgorithm(StrEnum):
    """Algorithm by which gradients are summed over ranks, such as a ring."""

    HOSTS = "tree by hosts"  # exact: within each host first, then each share between hosts
    FLAT = "flat tree"  # exact: an all-to-all and an all-gather of all ranks
    RING = "ring"  # a ring all-reduce, whose order of additions depends on the layout
    SERVERS = "servers"  # parameter servers


def way_of(exchange: str, strategy: str | None, *, on_cpu: bool) -> ReduceAlgorithm:
    """Return the algorithm by which an exchange or a strategy sums gradients over ranks.

    `on_cpu`: whether the ranks compute on CPUs.
    """
    if exchange in AT_SERVERS:
        return ReduceAlgorithm.SERVERS
    if strategy in SHARDED or exchange == "mpi":
        return ReduceAlgorithm.FLAT
    if exchange in ("tree", "shared-memory"):
        return ReduceAlgorithm.HOSTS if on_cpu else ReduceAlgorithm.FLAT
    return ReduceAlgorithm.RING


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages and bytes of each step, between hosts and within a host.

    Attributes:
        link_messages: messages that a rank sends to ranks of other hosts.
        link_bytes: bytes on the link of the busiest host, in one direction.
        local_messages: messages that a rank sends to ranks of its host.
        local_bytes: bytes that a rank gets from ranks of its host.
    """

    link_messages: float = 0.0
    link_bytes: float = 0.0
    local_messages: float = 0.0
    local_bytes: float = 0.0

    def times(self, sums: float, volume: float) -> Traffic:
        """Return this traffic, which is of 1 sum and 1 byte, scaled to `sums` sums and `volume` bytes."""
        return Traffic(
            self.link_messages * sums,
            self.link_bytes * volume,
            self.local_messages * sums,
            self.local_bytes * volume,
        )


def traffic(way: ReduceAlgorithm, layout: Layout, replicas: int | None = None) -> Traffic:
    """Return the numbers of messages and bytes of one gradient sum by the algorithm `way`.

    Bytes are counted for each byte of gradients. `replicas`: number of replicas of the run; `None` if there
    are as many as ranks.
    """
    if layout.ranks == 1:
        return Traffic()
    if layout.hosts == 1:
        inside = _everywhere(way, layout.ranks)
        return Traffic(local_messages=inside.link_messages, local_bytes=inside.link_bytes)
    return _BETWEEN[way](layout, replicas or layout.ranks)


def _everywhere(way: ReduceAlgorithm, count: int) -> Traffic:
    """Return the traffic of one sum over `count` ranks if all links between them are alike.

    `way`: algorithm of the sum. The result has messages, and bytes for each byte of gradients.
    """
    if way == ReduceAlgorithm.SERVERS:  # a server's link carries the gradients of every rank
        return Traffic(2, count)
    return Traffic(2 * (count - 1), 2 * (count - 1) / count)


def _by_hosts(layout: Layout, replicas: int) -> Traffic:
    hosts = layout.hosts
    blocks = _blocks(layout, replicas, layout.per_host)
    rounds = hosts.bit_length() - 1 if halving.pays(blocks, replicas) else hosts - 1
    own = max(len(nodes(one, replicas)) for one in blocks)
    inside = _everywhere(ReduceAlgorithm.HOSTS, layout.per_host)
    sent = (own + 1) * (hosts - 1) / hosts
    return Traffic(2 * rounds, sent, inside.link_messages, inside.link_bytes)


def _flat(layout: Layout, replicas: int) -> Traffic:
    """Return the traffic of one sum by an all-to-all and a ring all-gather over all ranks.

    The algorithm does not treat ranks on the same host differently from others.
    """
    ranks, each = layout.ranks, layout.per_host
    own = max(len(nodes(one, replicas)) for one in _blocks(layout, replicas, 1))
    ring = (ranks - 1) / ranks
    scattered = own * each * (ranks - each) / ranks
    return Traffic(
        2 * (ranks - 1), scattered + ring, 0, (own * (each - 1) / ranks + ring) * (each > 1)
    )


def _blocks(layout: Layout, replicas: int, ranks: int) -> list[range]:
    """Divide all ranks into groups of `ranks` neighbours; return the range of replicas of each group."""
    each = [block(replicas, layout.ranks, rank) for rank in range(layout.ranks)]
    firsts = range(0, layout.ranks, ranks)
    return [range(each[first].start, each[first + ranks - 1].stop) for first in firsts]


#: For each algorithm, a function from layout and replicas to the traffic of one sum on several hosts. A
#: ring crosses each host's link once, and its bytes within a host pass at the same time.
_BETWEEN: Mapping[ReduceAlgorithm, Callable[[Layout, int], Traffic]] = {
    ReduceAlgorithm.HOSTS: _by_hosts,
    ReduceAlgorithm.FLAT: _flat,
    ReduceAlgorithm.RING: lambda layout, _: _everywhere(ReduceAlgorithm.RING, layout.ranks),
    ReduceAlgorithm.SERVERS: lambda layout, _: _everywhere(ReduceAlgorithm.SERVERS, layout.ranks),
}


def sent_by_rank(way: ReduceAlgorithm, layout: Layout) -> float:
    """Return how many bytes a run records as sent by each rank, per byte of summed gradients.

    `way`: algorithm of the sum. The run has as many replicas as ranks.
    """
    if way == ReduceAlgorithm.SERVERS:
        return 1.0
    if way == ReduceAlgorithm.HOSTS and layout.hosts > 1:
        return traffic(way, layout).link_bytes / layout.per_host
    return _everywhere(way, layout.ranks).link_bytes
