"""Who reaches whom: what follows from attempts alone, and members that are threads on one host."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.errors import UnreachableError
from lockstep.world.network import Interface, listen
from lockstep.world.rendezvous import connectivity_check, members
from lockstep.world.rendezvous.connectivity_check import (
    Attempt,
    ProbeTarget,
    check_connectivity,
    choose,
    offers,
    partners,
    problem,
)
from lockstep.world.rendezvous.port_discovery import Announcer
from tests.unit.threads import Party, together

LOOPBACK = Interface("lo", "127.0.0.1")
LABELS = ["node 0 (a)", "node 1 (b)", "node 2 (c)", "node 3 (d)"]


def eth(member: int, name: str = "eth0") -> Interface:
    return Interface(name, f"10.0.0.{member}")


def card(member: int, *offered: Interface) -> ProbeTarget:
    return ProbeTarget(f"token {member}", 4000 + member, offered or (eth(member), LOOPBACK))


def reach(member: int, place: Interface | None = None, source: Interface | None = None) -> Attempt:
    return Attempt(member, place or eth(member), source, "")


def miss(
    member: int,
    place: Interface | None = None,
    source: Interface | None = None,
    why: str = "timed out",
) -> Attempt:
    return Attempt(member, place or eth(member), source, why)


# What follows from attempts.


def test_what_a_host_offers() -> None:
    docker = Interface("docker0", "10.0.0.7")
    first, second = (Interface("eth0", text) for text in ("10.0.0.1", "fd00::1"))
    assert offers([LOOPBACK, docker, first, second]) == (eth(1), eth(7, "docker0"), LOOPBACK)
    many = [Interface(f"veth{k}", f"10.0.0.{k}") for k in range(40)]
    assert offers([LOOPBACK, *many, first])[0] == eth(1)
    assert len(offers([LOOPBACK, *many, first])) == 8


IB, DEAD = eth(0, "ib0"), eth(9, "eno1")


@pytest.mark.parametrize(
    ("cards", "reports", "places"),
    [
        # The first interface of member 0 that all reach, and by which they do.
        (
            [card(0, DEAD, eth(0)), card(1), card(2)],
            [
                [],
                [miss(0, DEAD), reach(0, source=eth(1))],
                [miss(0, DEAD), reach(0, source=eth(2))],
            ],
            [[eth(0)], [eth(1)], [eth(2)]],
        ),
        (
            [card(0, IB, eth(0)), card(1), card(2)],
            [[], [reach(0, IB, eth(1, "ib1")), reach(0)], [reach(0, IB, eth(2, "ib2")), reach(0)]],
            [[IB], [eth(1, "ib1")], [eth(2, "ib2")]],
        ),
        # What the user chose wins; loopback only where nothing else is common.
        (
            [card(0), card(1, IB)],
            [[], [reach(0, source=eth(1)), reach(0, LOOPBACK, LOOPBACK)]],
            [[eth(0)], [IB]],
        ),
        ([card(0), card(1)], [[], [reach(0, LOOPBACK, LOOPBACK)]], [[LOOPBACK], [LOOPBACK]]),
        # None that all reach: the others are tried all the same, so that pairs can be named.
        (
            [card(0, IB, eth(0)), card(1), card(2)],
            [[], [reach(0, IB, eth(1, "ib1")), miss(0)], [miss(0, IB), miss(0)]],
            [[IB, eth(0)], [eth(1, "ib1")], [eth(2)]],
        ),
        ([card(0)], [[]], [[eth(0)]]),
    ],
)
def test_where_members_are_tried(
    cards: list[ProbeTarget], reports: list[list[Attempt]], places: list[list[Interface]]
) -> None:
    assert choose(cards, reports) == places


@pytest.mark.parametrize(
    ("reports", "said"),
    [
        ([[reach(1)], [reach(0)]], []),
        ([[reach(1)], [miss(0, LOOPBACK), reach(0)]], []),
        (
            [[reach(1), reach(2)], [reach(0), miss(2, source=eth(1))], [reach(0), miss(1)]],
            [
                "node 1 (b) and node 2 (c) cannot reach each other:",
                "  node 1 (b) from eth0 10.0.0.1 to eth0 10.0.0.2 port 4002: timed out",
                "  node 2 (c) from no interface to eth0 10.0.0.1 port 4001: timed out",
            ],
        ),
        (
            [[miss(1, LOOPBACK, why="connection refused"), miss(1)], [reach(0)]],
            [
                "node 0 (a) cannot reach node 1 (b), though node 1 (b) reaches node 0 (a):",
                "  node 0 (a) from no interface to eth0 10.0.0.1 port 4001: timed out",
            ],
        ),
    ],
)
def test_which_pairs_are_named(reports: list[list[Attempt]], said: list[str]) -> None:
    cards = [card(member) for member in range(len(reports))]
    assert problem(cards, reports, LABELS).splitlines() == said


@pytest.mark.parametrize(("count", "most"), [(2, 1), (128, 127), (129, 14), (1000, 20)])
def test_each_pair_that_is_tried_is_tried_by_both(count: int, most: int) -> None:
    tried = {(by, to) for by in range(count) for to in partners(by, count)}
    assert tried == {(to, by) for by, to in tried}
    assert all(by != to for by, to in tried)
    assert max(len(partners(by, count)) for by in range(count)) == most
    if count <= 128:
        assert len(tried) == count * (count - 1), "all pairs"


def test_what_a_sample_of_pairs_finds() -> None:
    """Of 200 nodes: one that no other reaches, and a network that is divided in two."""
    labels = [f"node {k}" for k in range(200)]
    cards = [card(k) for k in range(200)]

    def of(apart: Callable[[int, int], bool]) -> str:
        tried = [
            [miss(to) if apart(by, to) else reach(to) for to in partners(by, 200)]
            for by in range(200)
        ]
        return problem(cards, tried, labels)

    assert of(lambda by, to: False) == ""
    assert of(lambda by, to: 77 in (by, to)).endswith("all of these pairs have node 77 in common")
    for border in (1, 100, 199):
        divided = of(lambda by, to: (by < border) != (to < border))  # noqa: B023 - called at once
        assert "cannot reach each other" in divided


def test_many_pairs_are_not_all_told() -> None:
    labels = [f"node {number}" for number in range(12)]
    cards = [card(member) for member in range(12)]
    reports = [[miss(other) for other in range(12) if other != one] for one in range(12)]
    lines = problem(cards, reports, labels).splitlines()
    assert lines[-1] == "and 60 more pairs"
    assert len(lines) == 6 * 3 + 1
    reports = [[miss(2)], [miss(2)], [miss(0), miss(1), miss(3)], [miss(2)]]
    lines = problem(cards[:4], reports, LABELS).splitlines()
    assert lines[-1] == "all of these pairs have node 2 (c) in common"


# Members that are threads.


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "_SLACK", 0.4)
    monkeypatch.setattr(members, "_LINGER_SECONDS", 0.1)


def check(
    store: dist.Store, index: int, count: int, interface: str | None = "lo", **more: Any
) -> Any:
    labels = [f"node {number} (host{number})" for number in range(count)]
    more = {"patience": 5.0, "seconds": 1.0, **more}
    return check_connectivity(store, index=index, labels=labels, interface=interface, **more)


def the_error(told: list[Any]) -> str:
    assert all(isinstance(one, UnreachableError) for one in told), told
    assert len({one.message for one in told}) == 1, "the same text on every member"
    assert "--interface" in told[0].hint
    return str(told[0].message)


@pytest.mark.parametrize("count", [1, 3])
def test_all_find_the_same(count: int) -> None:
    store = dist.HashStore()
    told = together(*(partial(check, store, index, count) for index in range(count)))
    assert told == [(LOOPBACK,) * count] * count


def test_many_members_through_a_real_store() -> None:
    """Each member has a connection of its own: clients of a store wait for each other."""
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def client(index: int) -> Any:
        mine = dist.TCPStore("127.0.0.1", master.port, is_master=False)
        return check(dist.PrefixStore("network", mine), index, 20, None)

    with ThreadPoolExecutor(20) as pool:
        told = list(pool.map(client, range(20)))
    assert len(set(told)) == 1, "without a choice of the user's the members of one host agree"


def test_a_member_may_be_slow_to_come() -> None:
    store = dist.HashStore()
    first = Party(partial(check, store, 0, 2))
    assert isinstance(first.end(1.5), TimeoutError), "it waits for longer than an attempt takes"
    assert check(store, 1, 2) == first.end() == (LOOPBACK,) * 2


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("here", "said"),
    [
        ((0, 2), "node 1 (host1) met the others, but did not come to try the network within 0.3 s"),
        ((1, 2), "node 0 (host0) did not answer within 0.7 s"),
    ],
)
def test_a_member_that_does_not_come(here: tuple[int, ...], said: str) -> None:
    store = dist.HashStore()
    told = together(*(partial(check, store, index, 3, patience=0.3) for index in here))
    assert the_error(told).startswith(said)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("written", "said"),
    [
        ({}, "node 1 (host1) left while the network was tried, within 0.5 s"),
        ({"cards/1": '{"port": 3}'}, "the value of a member cannot be read"),
        ({"cards/1": '"card"'}, "the value of a member cannot be read"),
        ({"first/0/1": "[7]"}, "the value of a member cannot be read"),
        ({"first/0/1": '[0, [{"member": 3}]]'}, "the value of a member cannot be read"),
        ({"cards/1": "x" * 10_000}, "the value of node 1 (host1) cannot be read"),
    ],
)
def test_a_member_that_leaves_or_says_nonsense(written: dict[str, str], said: str) -> None:
    store = dist.HashStore()
    store.set("cards/1", json.dumps(asdict(card(1, LOOPBACK))))
    for key, text in written.items():
        store.set(key, text)
    told = together(*(partial(check, store, index, 3, patience=0.5) for index in (0, 2)))
    assert the_error(told).startswith(said)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "answered by something else than Lockstep"),
        (b"x" * 100_000, "answered by something else than Lockstep"),
        (b'{"token": "another"}\n', "answered by another launch"),
        (None, "connection refused"),
    ],
)
def test_another_one_listens_there(
    said: bytes | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Member 1 reaches member 0, but its listener is not where it says."""
    monkeypatch.setattr(connectivity_check, "interfaces", tuple)
    store = dist.HashStore()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        answering = threading.Thread(target=_answer, args=(server, said))
        answering.start()
        if said is None:
            server.shutdown(socket.SHUT_RDWR)
            server.close()
        store.set("cards/1", json.dumps(asdict(ProbeTarget("token", port, (LOOPBACK,)))))
        store.set("first/0/1", json.dumps([time.time(), [asdict(reach(0, LOOPBACK, LOOPBACK))]]))
        store.set("pairs/1", json.dumps([asdict(reach(0, LOOPBACK, LOOPBACK))]))
        error = the_error([Party(partial(check, store, 0, 2)).end()])
        answering.join()
    assert "node 0 (host0) cannot reach node 1 (host1), though node 1 (host1) reaches" in error
    assert error.endswith(f"to lo 127.0.0.1 port {port}: {why}")


def _answer(server: socket.socket, said: bytes | None) -> None:
    try:
        connection, _ = server.accept()
        with connection:
            connection.sendall(said or b"")
    except OSError:
        assert said is None or len(said) > 1000, "the listener is closed, or the line too long"


def tell(store: dist.Store, member: int, port: int, *reports: list[Attempt]) -> None:
    """Leave in the store what a member of two looks would, which reaches all in the end."""
    store.set(
        f"cards/{member}", json.dumps(asdict(ProbeTarget(f"token {member}", port, (LOOPBACK,))))
    )
    for look, report in enumerate(reports):
        told = [time.time(), [asdict(one) for one in report]]
        store.set(f"first/{look}/{member}", json.dumps(told))
    store.set(f"pairs/{member}", json.dumps([asdict(reach(0, LOOPBACK, LOOPBACK))]))


def test_a_way_that_fails_at_first_is_tried_again() -> None:
    store = dist.HashStore()
    listener = listen(0, loopback=True)
    with Announcer(listener, {"token": "token 1"}):
        first, second = [miss(0, LOOPBACK, LOOPBACK)], [reach(0, LOOPBACK, LOOPBACK)]
        tell(store, 1, listener.getsockname()[1], first, second)
        assert check(store, 0, 2) == (LOOPBACK,) * 2


def test_members_that_are_tried_late_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectivity_check, "_AT_ONCE", 1)
    store, listener = dist.HashStore(), listen(0, loopback=True)
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Announcer(listener, {"token": "token 2"}),
    ):
        for member, port in ((1, silent.getsockname()[1]), (2, listener.getsockname()[1])):
            tell(store, member, port, [reach(0, LOOPBACK, LOOPBACK)])
        error = the_error([Party(partial(check, store, 0, 3, seconds=0.3)).end()])
    assert "node 0 (host0) cannot reach node 1 (host1)" in error
    assert "node 2" not in error


# Clocks.


class Clock:
    """A clock that is ahead in some threads."""

    def __init__(self) -> None:
        self._own = threading.local()

    def set_ahead(self, seconds: float) -> None:
        self._own.ahead = seconds

    def time(self) -> float:
        return time.time() + getattr(self._own, "ahead", 0.0)

    @staticmethod
    def monotonic() -> float:
        return time.monotonic()


@pytest.mark.parametrize(
    ("ahead", "said"),
    [
        ((0, 1.0, -1.0), []),
        ((0, 60, -7200), ["node 1 (host1) is 60 s ahead of", "node 2 (host2) is 7200 s behind"]),
        ((60, 0, 60), ["node 1 (host1) is 60 s behind that of node 0"]),
    ],
)
def test_clocks_that_differ_are_named(
    ahead: tuple[float, ...],
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    clock, store = Clock(), dist.HashStore()
    monkeypatch.setattr(connectivity_check, "time", clock)

    def take_part(index: int) -> Any:
        clock.set_ahead(ahead[index])
        return check(store, index, 3)

    assert together(*(partial(take_part, k) for k in range(3))) == [(LOOPBACK,) * 3] * 3
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == len(said)
    assert all(one in line for one, line in zip(said, lines, strict=True))
