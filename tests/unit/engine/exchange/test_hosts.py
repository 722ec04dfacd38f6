"""The exchange over several hosts, its ranks played by threads of this process (A4)."""

from __future__ import annotations

import itertools
import queue
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engine.exchange import hosts as module
from lockstep.engine.exchange.base import Forest
from lockstep.engine.exchange.halving import HalvingExchange
from lockstep.engine.exchange.hosts import find_hosts
from lockstep.engine.exchange.shared_memory import SharedMemoryExchange, shares_of
from lockstep.engine.exchange.tree import TreeExchange
from lockstep.engine.layout.tree import fold, nodes, total
from lockstep.errors import PeerError
from tests.unit.engine.exchange.test_shared_memory import (
    gradients,
    on_threads,
    rank_nodes,
    same_bits,
)

_SECONDS = 60


class Network:
    """Carries tensors between threads, in the order in which they are sent, and counts sent bytes."""

    def __init__(self) -> None:
        self._lines: defaultdict[tuple[int, ...], queue.Queue[torch.Tensor]] = defaultdict(
            queue.Queue
        )
        self._counts: defaultdict[tuple[int, int, bool], int] = defaultdict(int)
        self._lock = threading.Lock()
        self.sent: defaultdict[int, int] = defaultdict(int)
        self.messages: defaultdict[int, int] = defaultdict(int)

    def _next(self, source: int, target: int, *, sends: bool) -> queue.Queue[torch.Tensor]:
        with self._lock:
            self._counts[source, target, sends] += 1
            return self._lines[source, target, self._counts[source, target, sends]]

    def send(self, source: int, target: int, tensor: torch.Tensor) -> None:
        self.sent[source] += tensor.nbytes
        self.messages[source] += 1
        self._next(source, target, sends=True).put(tensor.clone())

    def receive(self, source: int, target: int, part: torch.Tensor) -> Callable[[], object]:
        """Begin to receive; return the wait for it."""
        line = self._next(source, target, sends=False)
        return lambda: part.copy_(line.get(timeout=_SECONDS))


class NetworkWire:
    """The wire of one rank over a `Network`."""

    sent = 0

    def __init__(self, network: Network, ranks: Sequence[int], own: int) -> None:
        self._network, self._ranks, self._own = network, ranks, own

    def scatter(self, outgoing: torch.Tensor, received: torch.Tensor, shares: Sequence[int]) -> Any:
        rows = outgoing.chunk(len(shares))
        return self._begin(rows, received.split_with_sizes(list(shares)))

    def gather(self, part: torch.Tensor, total: torch.Tensor) -> Any:
        size = len(self._ranks)
        return self._begin([part] * size, total.chunk(size))

    def swap(self, other: int, outgoing: torch.Tensor, incoming: torch.Tensor) -> Any:
        own, rank = self._ranks[self._own], self._ranks[other]
        arriving = Arriving([self._network.receive(rank, own, incoming)])
        self._network.send(own, rank, outgoing)
        return arriving

    def _begin(self, rows: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> Any:
        own, waits = self._ranks[self._own], []
        for rank, row, part in zip(self._ranks, rows, parts, strict=True):
            if rank == own:
                part.copy_(row)
            else:
                waits.append(self._network.receive(rank, own, part))
                self._network.send(own, rank, row)
        return Arriving(waits)


class Arriving:
    def __init__(self, waits: list[Callable[[], object]]) -> None:
        self._waits = waits

    def wait(self) -> None:
        for wait in self._waits:
            wait()


def ranges(counts: Sequence[int]) -> list[range]:
    starts = [sum(counts[:number]) for number in range(len(counts))]
    return [range(start, start + count) for start, count in zip(starts, counts, strict=True)]


def exchange_of(
    store: dist.Store, network: Network, forest: Forest, hosts: list[range], **room: int
) -> SharedMemoryExchange:
    between = forest.between(hosts)
    share, across = forest.rank - hosts[between.rank].start, None
    if share < shares_of(hosts):
        wire = NetworkWire(network, [ranks[share] for ranks in hosts], between.rank)
        halves = module.halving.pays(between.blocks, between.replicas)
        across = HalvingExchange(wire, between) if halves else TreeExchange(wire, between)
    return SharedMemoryExchange(store, "x", forest, hosts=hosts, across=across, **room)


def exchange_all(
    counts: Sequence[int], replicas: int, sizes: Sequence[int], passes: int = 3
) -> Network:
    """Sum buckets on hosts of threads; compare each rank's sums with the tree's."""
    store, network, hosts = dist.HashStore(), Network(), ranges(counts)
    size = sum(counts)
    plan = [
        [gradients(replicas, 100 * turn + i, n, torch.float32) for i, n in enumerate(sizes)]
        for turn in range(passes)
    ]
    done = threading.Barrier(size, timeout=_SECONDS)

    def body(rank: int) -> None:
        forest = Forest.of(replicas, size, rank)
        room = {"capacity": 4 * sum(sizes), "buckets": len(sizes)}
        exchange = exchange_of(store, network, forest, hosts, **room)
        try:
            for turn in plan:
                futures = []
                for values in turn:
                    slots = exchange.slots(values[0])
                    for slot, node in zip(slots, rank_nodes(values, size, rank), strict=True):
                        slot.copy_(node)
                    futures.append(exchange.start(slots, last=values is turn[-1]))
                for values, future in zip(turn, futures, strict=True):
                    assert future.done(), "after the last bucket all sums are complete"
                    assert same_bits(future.value(), total(values, torch.add))
            done.wait()
        finally:
            exchange.close()

    assert on_threads(size, body) == [None] * size
    return network


@pytest.mark.parametrize(
    "counts",
    [
        *((1, 1), (2, 2), (3, 1), (1, 3), (1, 2, 1), (2, 1, 3)),
        *((4, 4), (2, 2, 2, 2), (1, 1, 1, 1), (5, 2), (3, 3, 3)),
    ],
    ids=str,
)
@pytest.mark.parametrize("more", [0, 1, 6], ids=["one each", "one more", "six more"])
def test_every_layout_of_hosts_has_the_bits_of_the_tree(counts: tuple[int, ...], more: int) -> None:
    exchange_all(counts, sum(counts) + more, [5, 40_001, 1, 64])


@given(st.integers(1, 24), st.data())
@settings(max_examples=60, deadline=None)
def test_sums_of_hosts_are_nodes_of_the_tree(replicas: int, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, replicas))
    cuts = data.draw(st.sets(st.integers(1, size - 1))) if size > 1 else set()
    edges = [0, *sorted(cuts), size]
    hosts = [range(*pair) for pair in itertools.pairwise(edges)]
    values = gradients(replicas, replicas, 9, torch.float32)
    parts = []
    for host in hosts:
        forest = Forest.of(replicas, size, host[-1])
        within = forest.within(host)
        own = [node for rank in host for node in rank_nodes(values, size, rank)]
        added = within.fold_in_place(own)
        block = range(forest.blocks[host[0]].start, forest.blocks[host[-1]].stop)
        assert len(added) == len(nodes(block, replicas))
        parts += added
    between = Forest.of(replicas, size, 0).between(hosts)
    assert between.rank == 0
    assert sum(between.counts) == len(parts)
    (root,) = fold(parts, between.merges, torch.add)
    assert same_bits(root, total(values, torch.add))


@pytest.mark.parametrize(("counts", "limit"), [((2, 2), 1.0), ((4, 4), 1.0), ((2, 2, 2, 2), 1.5)])
def test_bytes_that_leave_a_host(counts: tuple[int, ...], limit: float) -> None:
    size = 64_000
    network = exchange_all(counts, sum(counts), [size], passes=2)
    for host in ranges(counts):
        assert sum(network.sent[rank] for rank in host) == 2 * 4 * size * limit


@pytest.fixture
def from_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let recursive halving begin with two hosts."""
    monkeypatch.setattr(module.halving, "FEWEST", 2)


@pytest.mark.parametrize("counts", [(2, 2), (2, 2, 2, 2), (1,) * 8, (2,) * 8], ids=str)
@pytest.mark.parametrize("each", [1, 2, 4], ids="{} replicas each".format)
@pytest.mark.usefixtures("from_two")
def test_halving_has_the_bits_of_the_tree(counts: tuple[int, ...], each: int) -> None:
    hosts = len(counts)
    sizes = [hosts - 1, hosts, hosts + 1, 40_001, 1, 64]
    network = exchange_all(counts, each * sum(counts), sizes, passes=2)
    rounds = 2 * (hosts.bit_length() - 1)
    assert set(network.messages.values()) == {rounds * len(sizes) * 2}


def layouts_of(hosts: int, each: int, replicas: int) -> bool:
    forest = Forest.of(replicas, hosts * each, 0).between(ranges((each,) * hosts))
    return module.halving.pays(forest.blocks, forest.replicas)


def test_where_halving_is_chosen() -> None:
    assert [layouts_of(hosts, 1, hosts) for hosts in (4, 7, 8, 9, 16)] == [
        *(False, False, True, False, True)
    ]
    assert layouts_of(8, 2, 16)
    assert layouts_of(8, 2, 32)  # more replicas than ranks
    assert not layouts_of(8, 3, 24), "three replicas are two nodes"
    assert not layouts_of(8, 1, 12), "nodes of different sizes"


@pytest.mark.usefixtures("from_two")
def test_halving_sends_as_many_bytes() -> None:
    network = exchange_all((2,) * 4, 8, [64_000], passes=2)
    for host in ranges((2,) * 4):
        assert sum(network.sent[rank] for rank in host) == 2 * 4 * 64_000 * 1.5


def test_shares_are_sent_before_the_last_bucket() -> None:
    """The exchange between hosts overlaps with the rest of the backward pass."""
    store, network, hosts = dist.HashStore(), Network(), ranges((2, 2))
    turn = threading.Barrier(4, timeout=_SECONDS)

    def body(rank: int) -> int:
        forest = Forest.of(4, 4, rank)
        exchange = exchange_of(store, network, forest, hosts, capacity=4000, buckets=3)
        try:
            for last in (False, False, True):
                if last:
                    sent = network.sent[rank]
                exchange.start(exchange.slots(torch.zeros(256)), last=last)
                turn.wait()
            return sent
        finally:
            exchange.close()

    half = 256  # bytes: one of two shares of the first bucket, and of that what the other host sums
    assert all(sent >= half for sent in on_threads(4, body))


def test_a_rank_of_the_host_that_is_gone_is_named_by_its_rank_in_the_run() -> None:
    store, network, hosts = dist.HashStore(), Network(), ranges((2, 3))

    def body(rank: int) -> None:
        forest = Forest.of(5, 5, rank)
        exchange = exchange_of(store, network, forest, hosts, capacity=400, buckets=1)
        try:
            if rank in (2, 4):
                exchange.start(exchange.slots(torch.zeros(100)), last=True)
        finally:
            exchange.close()

    results = on_threads(5, body)
    assert all(isinstance(results[rank], PeerError) for rank in (2, 4)), results
    assert any("rank 3 is gone" in str(results[rank]) for rank in (2, 4)), results


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([7, 7, 7], [range(3)]),
        ([7, 7, 8, 8], [range(2), range(2, 4)]),
        ([7, 8, 7, 8], [range(1), range(1, 2), range(2, 3), range(3, 4)]),  # by turns
        ([7, 7, 7, 0], [range(1), range(1, 2), range(2, 3), range(3, 4)]),  # refused on one
    ],
)
def test_hosts_are_neighbouring_ranks_that_can_share_memory(
    monkeypatch: pytest.MonkeyPatch, numbers: list[int], expected: list[range]
) -> None:
    def gather(_own: Sequence[int], _group: object) -> list[list[int]]:
        return [[number] for number in numbers]

    monkeypatch.setattr(module, "gather_numbers", gather)
    assert find_hosts(object()) == expected  # type: ignore[arg-type]


def test_hosts_differ_by_namespace_and_user(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = module._host_number()
    assert own == module._host_number() != 0
    monkeypatch.setattr(module.os, "geteuid", lambda: 12345)
    assert module._host_number() not in (own, 0)
    monkeypatch.undo()
    monkeypatch.setattr(module.host, "identity", lambda: "a boot/another namespace")
    assert module._host_number() not in (own, 0)
    monkeypatch.undo()

    def refuse(*_: object) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(module.os, "memfd_create", refuse)
    assert module._host_number() == 0
    assert "refuses shared memory (Operation not permitted)" in capsys.readouterr().err
