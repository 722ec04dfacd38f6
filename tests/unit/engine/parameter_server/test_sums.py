"""The synchronous server: sums in tree order, for workers that come in any order (A3)."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

import pytest
import torch

from lockstep.engine.exchange.base import Forest
from lockstep.engine.layout.replicas import block
from lockstep.engine.layout.tree import fold, merges
from lockstep.engine.layout.tree import leaves as intervals
from lockstep.engine.parameter_server.client import Client, Clients
from lockstep.engine.parameter_server.exchange import ServerExchange
from lockstep.engine.parameter_server.messages import Kind
from lockstep.errors import MismatchError, PeerError
from tests.unit.engine.parameter_server.conftest import SECONDS, Service, workers


def leaves(replicas: int, numel: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(replicas, numel, generator=generator)


def expected(values: torch.Tensor) -> torch.Tensor:
    (root,) = reduced(values, 1, 0)
    return root


def reduced(values: torch.Tensor, size: int, rank: int) -> list[torch.Tensor]:
    """Return the tree nodes of a rank."""
    own = block(len(values), size, rank)
    counts, _ = merges(intervals(own), len(values))
    return fold([values[i] for i in own], counts, torch.add)


def train(clients: Clients, forest: Forest, buckets: list[torch.Tensor]) -> list[torch.Tensor]:
    """Sum several buckets, as one backward pass does."""
    exchange = ServerExchange(clients, forest)
    sums = []
    for number, values in enumerate(buckets):
        nodes = reduced(values, forest.size, forest.rank)
        slots = exchange.slots(torch.empty_like(values[0]))
        for slot, node in zip(slots, nodes, strict=True):
            slot.copy_(node)
        sums.append(exchange.start(slots, last=number == len(buckets) - 1, place=7))
    return [one.wait().clone() for one in sums]


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize(("size", "replicas"), [(1, 1), (1, 5), (2, 2), (2, 5), (3, 3), (3, 4)])
def test_sums_have_the_bits_of_one_process(
    serve: Callable[[int], Service], servers: int, size: int, replicas: int
) -> None:
    service = serve(servers)
    # The second bucket has fewer elements than there may be servers.
    buckets = [
        leaves(replicas, 1000),
        leaves(replicas, 2, seed=1),
        leaves(replicas, 70_000, seed=2),
    ]

    def worker(rank: int) -> list[torch.Tensor]:
        clients = service.join(rank, size, replicas)
        return train(clients, Forest.of(replicas, size, rank), buckets)

    for sums in workers(size, worker):
        for total, values in zip(sums, buckets, strict=True):
            assert torch.equal(total, expected(values))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_types(serve: Callable[[int], Service], dtype: torch.dtype) -> None:
    service, values = serve(2), leaves(2, 33).to(dtype)

    def worker(rank: int) -> torch.Tensor:
        return train(service.join(rank, 2, 2), Forest.of(2, 2, rank), [values])[0]

    assert all(torch.equal(one, values[0] + values[1]) for one in workers(2, worker))


def test_bytes_are_counted_on_both_ends(serve: Callable[[int], Service]) -> None:
    service, values = serve(1), leaves(2, 1000)
    all_clients = [service.join(rank, 2, 2) for rank in range(2)]

    def worker(rank: int) -> int:
        train(all_clients[rank], Forest.of(2, 2, rank), [values])
        return all_clients[rank].moved["sent"]

    workers(2, worker)
    first = all_clients[0]
    assert all(4000 < count < 4400 for count in first.moved.values())
    lines: list[str] = []
    first._say = lines.append
    assert first.ends() == first.moved
    assert lines == ["lockstep: server 0: 0.0 MB in, 0.0 MB out"]
    # A server counts what it has sent when the system has taken it: maybe a moment after the worker has.
    both = tuple(sum(one.moved[way] for one in all_clients) for way in ("sent", "received"))
    deadline = time.monotonic() + SECONDS
    while service.servers[0]._count() != both and time.monotonic() < deadline:
        time.sleep(0.01)
    assert service.servers[0]._count() == both


def test_two_models_do_not_meet(serve: Callable[[int], Service]) -> None:
    service = serve(1)

    def worker(rank: int) -> list[torch.Tensor]:
        forest = Forest.of(2, 2, rank)
        first, second = (service.join(rank, 2, 2, name) for name in ("first", "second"))
        both = [train(first, forest, [leaves(2, 10)]), train(second, forest, [leaves(2, 10, 5)])]
        return [one[0] for one in both]

    for first, second in workers(2, worker):
        assert torch.equal(first, expected(leaves(2, 10)))
        assert torch.equal(second, expected(leaves(2, 10, 5)))


# --- who is gone -------------------------------------------------------------------------------------


def test_a_worker_that_dies_ends_the_others_wait(serve: Callable[[int], Service]) -> None:
    service = serve(1)
    clients, other = service.join(0, 2, 2), service.join(1, 2, 2)
    exchange = ServerExchange(clients, Forest.of(2, 2, 0))
    other.all[0]._socket.close()
    with pytest.raises(PeerError, match="rank 1 is gone: it closed its connection before"):
        exchange.start([torch.ones(4)], last=True)


def test_a_worker_that_leaves_ends_the_wait_of_those_who_need_it(
    serve: Callable[[int], Service],
) -> None:
    service = serve(1)
    clients, other = service.join(0, 2, 2), service.join(1, 2, 2)
    exchange = ServerExchange(clients, Forest.of(2, 2, 0))
    exchange.start([torch.ones(4)], last=False)
    other.close()
    with pytest.raises(PeerError, match="rank 1 left the run before the others were done"):
        exchange.start([torch.ones(4)], last=True)


def test_who_comes_after_a_failure_hears_of_it(serve: Callable[[int], Service]) -> None:
    service = serve(1)
    stays, other = service.join(0, 3, 3), service.join(1, 3, 3)
    other.all[0]._socket.close()
    late = service.join(2, 3, 3)
    for clients in (stays, late):
        with pytest.raises(PeerError, match="rank 1 is gone"):
            clients.all[0].receive(Kind.SUM)


def test_a_server_that_is_gone(serve: Callable[[int], Service]) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    client = Client(socket.create_connection(listener.getsockname()), 3)
    accepted, _ = listener.accept()
    accepted.close()
    listener.close()
    with pytest.raises(PeerError, match="server 3 is gone: it closed its connection"):
        client.receive(Kind.SUM)
    with pytest.raises(PeerError, match="server 3 is gone"):
        client.send(Kind.PUSH, [torch.ones(10_000_000)])
    client.close()


def test_workers_in_different_batches(serve: Callable[[int], Service]) -> None:
    service = serve(1)

    def worker(rank: int) -> None:
        exchange = ServerExchange(service.join(rank, 2, 2), Forest.of(2, 2, rank))
        with pytest.raises(
            MismatchError, match="rank 1 computes gradients of another batch than rank 0"
        ):
            exchange.start([torch.ones(4)], last=True, place=rank)

    workers(2, worker)


def test_workers_with_different_buckets(serve: Callable[[int], Service]) -> None:
    service = serve(1)

    def worker(rank: int) -> None:
        exchange = ServerExchange(service.join(rank, 2, 2), Forest.of(2, 2, rank))
        with pytest.raises(MismatchError, match="rank 1 sends 20 bytes of a bucket; expected 16"):
            exchange.start([torch.ones(4 + rank)], last=True)

    workers(2, worker)
