"""The exchange through shared memory, its ranks played by threads of this process (A4)."""

from __future__ import annotations

import contextlib
import gc
import os
import resource
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lockstep.engine.exchange import peers
from lockstep.engine.exchange.base import Forest
from lockstep.engine.exchange.peers import SUMMED, WRITTEN, PeerSockets
from lockstep.engine.exchange.shared_memory import _SMALL, SharedMemoryExchange
from lockstep.engine.layout.replicas import block
from lockstep.engine.layout.tree import fold, leaves, merges, total
from lockstep.errors import PeerError, RunError
from tests.unit.threads import Party

_SECONDS = 60  # after which a hang is a failure


def on_threads(ranks: int, body: Callable[[int], Any]) -> list[Any]:
    """Run `body(rank)` in one thread per rank, and return what they returned or raised."""
    results: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:  # the test looks at it
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_SECONDS)
    assert not any(thread.is_alive() for thread in threads), f"a hang: {results}"
    return results


def gradients(replicas: int, number: int, size: int, dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    scales = 10.0 ** torch.randint(-3, 4, (replicas, 1), generator=generator)
    values = torch.randn(replicas, size, generator=generator) * scales
    values[:, 0] = -0.0
    return list(values.to(dtype))


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.dtype == right.dtype and torch.equal(
        left.view(torch.uint8), right.view(torch.uint8)
    )


def rank_nodes(values: list[torch.Tensor], ranks: int, rank: int) -> list[torch.Tensor]:
    own = block(len(values), ranks, rank)
    counts, _ = merges(leaves(own), len(values))
    return fold([values[replica].clone() for replica in own], counts, torch.add)


def exchange_all(
    replicas: int, ranks: int, buckets: list[tuple[int, torch.dtype]], passes: int, extra: int = 0
) -> None:
    """Sum `buckets` on `ranks` threads, and hold every rank's every sum against the tree's."""
    store = dist.HashStore()
    capacity = sum((size + extra) * dtype.itemsize for size, dtype in buckets)
    done = threading.Barrier(ranks, timeout=_SECONDS)
    plan = [
        [gradients(replicas, 1000 * turn + i, *bucket) for i, bucket in enumerate(buckets)]
        for turn in range(passes)
    ]

    def body(rank: int) -> None:
        forest = Forest.of(replicas, ranks, rank)
        exchange = SharedMemoryExchange(store, "x", forest, capacity=capacity, buckets=len(buckets))
        try:
            for turn in plan:
                futures = []
                for values in turn:
                    slots = exchange.slots(values[0][extra:], extra)
                    for slot, node in zip(slots, rank_nodes(values, ranks, rank), strict=True):
                        slot.copy_(node)
                    futures.append(exchange.start(slots, last=values is turn[-1]))
                for values, future in zip(turn, futures, strict=True):
                    assert future.done(), "after the last bucket all sums are complete"
                    assert same_bits(future.value(), total(values, torch.add))
            done.wait()
        finally:
            exchange.close()

    assert on_threads(ranks, body) == [None] * ranks


SMALL = _SMALL // 4
F32 = torch.float32


@pytest.mark.parametrize(("replicas", "ranks"), [(2, 2), (3, 3), (4, 2), (4, 3), (6, 2), (7, 3)])
def test_small_and_large_buckets_in_turns(replicas: int, ranks: int) -> None:
    sizes = [5, SMALL, SMALL + 1, 64, 2 * SMALL + 3, 1]
    exchange_all(replicas, ranks, [(size, F32) for size in sizes], passes=3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [33, 2 * _SMALL + 1], ids=["small", "large"])
def test_every_type(dtype: torch.dtype, size: int) -> None:
    exchange_all(6, 2, [(size, dtype), (7, dtype)], passes=2)


def test_types_mixed_in_one_pass() -> None:
    types = [torch.bfloat16, torch.float64, torch.float32]
    exchange_all(3, 2, [(13, dtype) for dtype in types], passes=2)


def test_many_passes_use_the_memory_again() -> None:
    exchange_all(3, 3, [(SMALL + 9, F32), (3, F32)], passes=9)


def test_many_buckets_in_one_pass() -> None:
    exchange_all(2, 2, [(3, F32)] * 700, passes=2)


def test_room_behind_a_bucket() -> None:
    exchange_all(5, 2, [(40, F32), (SMALL + 40, F32)], passes=3, extra=7)


def test_a_single_rank() -> None:
    exchange_all(5, 1, [(9, F32), (SMALL + 1, F32)], passes=2)


def test_another_order_of_the_sum_has_other_bits() -> None:
    values = gradients(7, 0, 4096, F32)
    plain = values[0].clone()
    for value in values[1:]:
        plain += value
    assert not same_bits(plain, total(values, torch.add))


@pytest.mark.parametrize("size", [8, SMALL + 8], ids=["small", "large"])
@pytest.mark.parametrize("leaver", [0, 2])
def test_a_peer_that_closes_is_named(size: int, leaver: int) -> None:
    store = dist.HashStore()

    def body(rank: int) -> None:
        forest = Forest.of(3, 3, rank)
        exchange = SharedMemoryExchange(store, "x", forest, capacity=4 * size, buckets=1)
        try:
            if rank != leaver:
                slots = exchange.slots(torch.zeros(size))
                exchange.start(slots, last=True)
        finally:
            exchange.close()

    results = on_threads(3, body)
    assert results[leaver] is None
    others = [error for rank, error in enumerate(results) if rank != leaver]
    assert all(isinstance(error, PeerError) for error in others), others
    # The first to notice closes too, so that the second may name the first.
    assert any(f"rank {leaver} is gone" in str(error) for error in others)
    assert all(error.hint for error in others)


def test_a_closed_exchange_lets_go_of_its_memory() -> None:
    def maps() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:lockstep-gradients")

    gc.collect()  # what other tests have left
    store, before = dist.HashStore(), maps()

    def body(rank: int) -> tuple[SharedMemoryExchange, torch.Tensor]:
        forest = Forest.of(3, 3, rank)
        exchange = SharedMemoryExchange(store, "x", forest, capacity=4 * SMALL, buckets=1)
        slots = exchange.slots(torch.zeros(SMALL // 4))
        slots[0].fill_(rank)
        total = exchange.start(slots, last=True).wait()
        return exchange, total

    kept = on_threads(3, body)
    assert maps() == before + 9
    for exchange, _ in kept:
        exchange.close()
    assert [total[0].item() for _, total in kept] == [3.0] * 3  # what lies there stays valid
    kept = [exchange for exchange, _ in kept]
    gc.collect()
    assert maps() == before


def test_a_lost_store_is_told_at_once() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    party = Party(lambda: PeerSockets(store, "p", 1, range(2)))
    del server
    error = party.end(20)
    assert isinstance(error, PeerError), error
    assert str(error).startswith("the store is gone, and with it the rank that hosts it")


def test_too_few_open_files_are_told_as_such() -> None:
    store = dist.HashStore()
    first, second = on_threads(2, lambda rank: PeerSockets(store, "p", rank, range(2)))
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with tempfile.TemporaryFile() as file:
            socket.send_fds(second._peers[0].socket, [b"fd"], [file.fileno()])
            free = os.dup(file.fileno())  # the lowest that is free
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free + 1, before[1]))
            with pytest.raises(
                RunError, match=r"cannot open the connections .*: Too many open files"
            ):
                first.exchange_descriptors(file.fileno())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        first.close()
        second.close()
        with contextlib.suppress(OSError):
            os.close(free)


def test_signals_of_peers() -> None:
    store, met = dist.HashStore(), threading.Barrier(3, timeout=_SECONDS)

    def body(rank: int) -> str:
        peers = PeerSockets(store, "p", rank, range(3))
        try:
            assert not peers.all_signalled(WRITTEN, 1, wait=False)
            met.wait()
            peers.signal(WRITTEN, 1)
            assert peers.all_signalled(WRITTEN, 1, wait=True)
            assert not peers.all_signalled(SUMMED, 1, wait=False)
            met.wait()
            if rank == 2:
                return "left"
            peers.all_signalled(WRITTEN, 2, wait=True)
        except PeerError:
            return "noticed"
        finally:
            peers.close()
        return "went on"

    assert on_threads(3, body) == ["noticed", "noticed", "left"]


def test_peers_need_no_directory_that_they_share(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As two containers with one network and a `/tmp` each."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "none"))
    store = dist.HashStore()
    met = on_threads(2, lambda rank: PeerSockets(store, "p", rank, range(2)))
    assert [type(one) for one in met] == [PeerSockets, PeerSockets], met
    for one in met:
        one.close()
    assert not list(tmp_path.iterdir())


def test_a_rank_of_another_kernel_is_an_error_at_once() -> None:
    store = dist.HashStore()
    store.set("peers/p/0", "lockstep-of-another-machine")
    error = Party(lambda: PeerSockets(store, "p", 1, range(2))).end()
    assert isinstance(error, PeerError), "machines that are copies of each other name the same boot"
    assert "rank 0 cannot be reached" in str(error)
    assert "--exchange tree" in str(error.hint)


def test_processes_of_another_user_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    waiting = Party(lambda: PeerSockets(store, "p", 0, range(2)))
    while not store.check(["peers/p/0"]):
        time.sleep(0.005)
    address = "\0" + store.get("peers/p/0").decode()
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as stranger,
        monkeypatch.context() as it,
    ):
        it.setattr(peers.os, "geteuid", lambda: os.getuid() + 1)
        stranger.connect(address)
        stranger.settimeout(10)
        assert stranger.recv(1) == b"", "it is shown out"
        error = Party(lambda: PeerSockets(store, "p", 1, range(2))).end()
        assert isinstance(error, PeerError)
        assert "belongs to user" in str(error)
    own = PeerSockets(store, "p", 1, range(2))
    others = waiting.end()
    assert isinstance(others, PeerSockets), "a stranger keeps the ranks from nothing"
    own.close()
    others.close()


def test_a_peer_that_has_said_all_may_leave_first() -> None:
    store, left, looked = dist.HashStore(), threading.Event(), threading.Event()

    def body(rank: int) -> bool:
        peers = PeerSockets(store, "p", rank, range(3))
        try:
            if rank == 0:
                assert left.wait(_SECONDS)
                assert not peers.all_signalled(WRITTEN, 1, wait=False), "rank 1 has said nothing"
                looked.set()
                return peers.all_signalled(WRITTEN, 1, wait=True)
            if rank == 1:
                looked.wait(_SECONDS)
            peers.signal(WRITTEN, 1)
        finally:
            peers.close()
            if rank == 0:
                looked.set()
            if rank == 2:
                left.set()
        return True

    assert on_threads(3, body)[0] is True


def test_descriptors_reach_every_peer() -> None:
    store = dist.HashStore()
    pipes = [os.pipe() for _ in range(3)]

    def body(rank: int) -> list[int]:
        peers = PeerSockets(store, "p", rank, range(3))
        try:
            received = peers.exchange_descriptors(pipes[rank][0])
        finally:
            peers.close()
        inodes = [os.fstat(descriptor).st_ino for descriptor in received]
        for descriptor in received:
            os.close(descriptor)
        return inodes

    expected = [os.fstat(read).st_ino for read, _ in pipes]
    assert on_threads(3, body) == [expected] * 3
    for pipe in pipes:
        for descriptor in pipe:
            os.close(descriptor)


def test_a_pass_too_large_for_the_memory_is_a_bug_of_ours() -> None:
    forest = Forest.of(1, 1, 0)
    exchange = SharedMemoryExchange(dist.HashStore(), "x", forest, capacity=4, buckets=1)
    with pytest.raises(AssertionError, match="more gradients than parameters"):
        exchange.slots(torch.zeros(1000))
    exchange.close()
