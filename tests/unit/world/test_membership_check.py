"""Roll calls of threads at stores of every kind."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import WorldError
from lockstep.world import World, membership_check
from lockstep.world.membership_check import Card, Place, places, problem_with
from tests.unit.threads import Party, together

WAIT = timedelta(seconds=5)
SHORT = timedelta(seconds=0.1)
VERSIONS = {"lockstep": "0.1", "torch": "2.13.0"}

#: Gives each party a client of one store.
Clients = Callable[[], dist.Store]


@pytest.fixture(params=["hash", "tcp", "file"])
def clients(request: pytest.FixtureRequest, tmp_path: Path) -> Clients:
    """Give each party a client of one store."""
    if request.param == "file":
        return lambda: dist.FileStore(str(tmp_path / "meeting"), -1)
    store: dist.Store = dist.HashStore()
    if request.param == "tcp":
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return lambda: dist.PrefixStore("roll", store)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(membership_check, "_SLACK", timedelta(seconds=0.1))
    monkeypatch.setattr(membership_check, "_SEE_OFF_SECONDS", 0.1)


def card(host: str = "a", size: int = 2, pid: int = 1, **changes: Any) -> Card:
    plain = Card(host=host, name=host, pid=pid, world=size, place=None, versions=VERSIONS)
    return replace(plain, **changes)


def place(local_rank: int, local_size: int, node_rank: int = 0, node_count: int = 1) -> Place:
    return Place(
        local_rank=local_rank, local_size=local_size, node_rank=node_rank, node_count=node_count
    )


def call_all(clients: Clients, cards: dict[int, Card], timeout: timedelta = WAIT) -> list[Any]:
    """Let the ranks of `cards` call the roll; return what each hears."""
    return together(
        *(
            lambda rank=rank, one=one: membership_check.call(clients(), rank, one, timeout)
            for rank, one in cards.items()
        )
    )


def the_error(told: list[Any]) -> str:
    assert all(isinstance(one, WorldError) for one in told), told
    assert len({(one.message, one.hint) for one in told}) == 1, "the same on every rank"
    assert told[0].hint
    return str(told[0].message)


# Everybody comes.


def test_places_follow_from_hosts(clients: Clients) -> None:
    hosts = ["b", "a", "b", "c", "a"]
    found = call_all(clients, {rank: card(host, 5) for rank, host in enumerate(hosts)})
    assert found == [
        place(0, 2, 0, 3),
        place(0, 2, 1, 3),
        place(1, 2, 0, 3),
        place(0, 1, 2, 3),
        place(1, 2, 1, 3),
    ]


def test_what_launchers_said_stays(clients: Clients) -> None:
    said = [place(1, 2), place(0, 2)]
    assert call_all(clients, {k: card(place=one) for k, one in enumerate(said)}) == said


def test_a_rank_that_comes_late(clients: Clients) -> None:
    first = Party(lambda: membership_check.call(clients(), 0, card(), WAIT))
    time.sleep(0.05)
    assert membership_check.call(clients(), 1, card(), WAIT) == place(1, 2)
    assert first.end() == place(0, 2)


def test_rank_0_that_comes_last(clients: Clients) -> None:
    second = Party(lambda: membership_check.call(clients(), 1, card(), WAIT))
    time.sleep(0.05)
    assert membership_check.call(clients(), 0, card(), WAIT) == place(0, 2)
    assert second.end() == place(1, 2)


def test_one_rank(clients: Clients) -> None:
    assert membership_check.call(clients(), 0, card(size=1), WAIT) == place(0, 1)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_places_part_every_host(hosts: list[str]) -> None:
    found = places([card(host, len(hosts)) for host in hosts])
    for host in set(hosts):
        here = [one for one, other in zip(found, hosts, strict=True) if other == host]
        assert [one.local_rank for one in here] == list(range(len(here)))
        assert {one.local_size for one in here} == {len(here)}
        assert len({one.node_rank for one in here}) == 1
    firsts = list(dict.fromkeys(one.node_rank for one in found))
    assert firsts == list(range(len(set(hosts))))
    assert {one.node_count for one in found} == {len(firsts)}


# What does not fit.


def test_versions_that_differ(clients: Clients) -> None:
    other = {**VERSIONS, "torch": "2.11.0"}
    told = call_all(clients, {0: card(), 1: card("b", versions=other)})
    assert the_error(told) == (
        "rank 1 on b has torch 2.11.0, rank 0 on a has 2.13.0; expected the same on all nodes"
    )


def test_a_library_that_is_not_there(clients: Clients) -> None:
    told = call_all(clients, {0: card(), 1: card("b", versions={"lockstep": "0.1"})})
    assert "rank 1 on b has torch None" in the_error(told)


def test_sizes_that_differ(clients: Clients) -> None:
    told = call_all(clients, {0: card("a", 2), 1: card("b", 4)})
    assert the_error(told) == (
        "rank 1 on b is in a world of 4, rank 0 on a in a world of 2; expected the same"
    )


def test_a_rank_beyond_the_world_of_rank_0(clients: Clients) -> None:
    found = call_all(clients, {0: card(size=2), 1: card(size=2), 3: card("b", size=4)})
    assert found[:2] == [place(0, 2), place(1, 2)]
    assert isinstance(found[2], WorldError)
    assert "rank 3 on b is in a world of 4, rank 0 in a world of 2" in found[2].message


def test_two_ranks_with_one_place(clients: Clients) -> None:
    same = place(0, 2)
    told = call_all(clients, {0: card(place=same), 1: card(place=same)})
    assert "ranks 0 and 1 are both local rank 0 of node 0 (a, a)" in the_error(told)


def test_one_node_on_two_hosts(clients: Clients) -> None:
    told = call_all(clients, {0: card("a", place=place(0, 2)), 1: card("b", place=place(1, 2))})
    assert "ranks 0 (a) and 1 (b) are both on node 0, but on different hosts" in the_error(told)


def test_two_nodes_on_one_host_may_be() -> None:
    # Two launchers on one host, or the nodes of a cluster that is only simulated.
    said = [place(0, 1, node, 2) for node in (0, 1)]
    assert problem_with([card("a", place=one) for one in said]) is None


def test_a_place_for_some_only(clients: Clients) -> None:
    told = call_all(clients, {0: card(place=place(0, 2)), 1: card("b")})
    assert "rank 1 on b does not know its local rank, though others do" in the_error(told)


def test_more_or_fewer_ranks_on_a_node_than_they_say(clients: Clients) -> None:
    told = call_all(clients, {0: card(place=place(0, 1)), 1: card("b", place=place(1, 2, 1, 2))})
    assert "rank 1 on b is one of 2 on node 1, and 1 have come from there" in the_error(told)


# Who does not come.


def test_one_rank_is_missing(clients: Clients, impatient: None) -> None:
    told = call_all(clients, {0: card(size=3), 2: card(size=3)}, SHORT)
    assert the_error(told) == "1 of 3 ranks did not come within 0.1 s: rank 1"


def test_many_ranks_are_missing(clients: Clients, impatient: None) -> None:
    told = call_all(clients, {0: card(size=20)}, SHORT)
    assert the_error(told) == (
        "19 of 20 ranks did not come within 0.1 s: rank 1, 2, 3, 4, 5, 6, 7, 8 …"
    )


def test_rank_0_is_missing(clients: Clients, impatient: None) -> None:
    told = call_all(clients, {1: card()}, SHORT)
    assert the_error(told) == "rank 0 did not answer within 0.2 s"


def test_launchers_are_called_nodes(clients: Clients, impatient: None) -> None:
    with pytest.raises(WorldError, match=r"1 of 2 nodes did not come within 0.1 s: node 1"):
        membership_check.call(clients(), 0, card(), SHORT, what="node")


def test_the_store_goes_with_rank_0(impatient: None, monkeypatch: pytest.MonkeyPatch) -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", host.port, is_master=False)
    waiting = Party(lambda: membership_check.call(client, 1, card(), WAIT))
    time.sleep(0.05)
    del host
    failure = waiting.end()
    assert isinstance(failure, WorldError)
    assert "rank 0 is gone, or the store is" in failure.message


def test_the_check_ends_it(clients: Clients) -> None:
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise InterruptedError

    waiting = [
        Party(
            lambda rank=rank: membership_check.call(
                clients(), rank, card(size=3), WAIT, check=check
            )
        )
        for rank in (0, 1)
    ]
    stop.set()
    assert [type(one.end()) for one in waiting] == [InterruptedError, InterruptedError]


def test_rank_0_leaves_last(monkeypatch: pytest.MonkeyPatch) -> None:
    # With rank 0 the store may go: all are to hear what is wrong before.
    store = dist.HashStore()
    began = threading.Event()
    cards = {0: card(), 1: card("b", versions={})}

    def rank_0() -> float:
        began.set()
        with pytest.raises(WorldError):
            membership_check.call(store, 0, cards[0], WAIT)
        return time.monotonic()

    first = Party(rank_0)
    began.wait(5)
    store.add("claim/1", 1)
    store.set("card/1", json.dumps(asdict(cards[1])))
    time.sleep(0.1)
    heard = time.monotonic()
    store.add("heard", 1)
    assert first.end() >= heard


def test_rank_0_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch, impatient: None) -> None:
    store = dist.HashStore()
    store.set("card/1", json.dumps(asdict(card("b", versions={}))))
    began = time.monotonic()
    with pytest.raises(WorldError, match="has lockstep None"):
        membership_check.call(store, 0, card(), WAIT)
    assert time.monotonic() - began < 2


# Who comes twice.


def test_a_stale_file(tmp_path: Path, impatient: None) -> None:
    def call_on_file(pid: int) -> list[Any]:
        cards = {rank: card(pid=pid + rank) for rank in (0, 1)}
        return call_all(lambda: dist.FileStore(str(tmp_path / "meeting"), -1), cards)

    assert call_on_file(100) == [place(0, 2), place(1, 2)]
    for rank, failure in enumerate(call_on_file(200)):
        assert isinstance(failure, WorldError)
        assert failure.message == (
            f"rank {rank} has come twice: on a, process {200 + rank}, "
            f"and on a, process {100 + rank}"
        )
        assert "stale file" in (failure.hint or "")


def test_a_file_that_only_rank_0_left(tmp_path: Path, impatient: None) -> None:
    clients = lambda: dist.FileStore(str(tmp_path / "meeting"), -1)  # noqa: E731
    assert isinstance(call_all(clients, {0: card(pid=1)}, SHORT)[0], WorldError)
    told = call_all(clients, {0: card(pid=2), 1: card(pid=3)}, SHORT)
    assert all(isinstance(one, WorldError) for one in told)
    assert "rank 0 has come twice" in told[0].message


def test_a_rank_that_died_between_its_claim_and_its_card(clients: Clients) -> None:
    clients().add("claim/0", 1)
    with pytest.raises(WorldError, match=r"rank 0 has come twice: on a, process 1\nhint: a stale"):
        membership_check.call(clients(), 0, card(), WAIT)


def test_the_same_rank_twice_while_another_is_awaited(clients: Clients, impatient: None) -> None:
    first = [
        Party(
            lambda rank=rank: membership_check.call(clients(), rank, card(size=3, pid=rank), WAIT)
        )
        for rank in (0, 1)
    ]
    wait_for(clients(), "card/0", "card/1")
    told = [*call_all(clients, {1: card(size=3, pid=9)}), *(one.end() for one in first)]
    assert "rank 1 has come twice: on a, process 9, and on a, process 1" in the_error(told)


def test_rank_0_twice_while_another_is_awaited(clients: Clients, impatient: None) -> None:
    first = Party(lambda: membership_check.call(clients(), 0, card(pid=1), WAIT))
    wait_for(clients(), "card/0")
    told = [*call_all(clients, {0: card(pid=2)}), first.end()]
    assert "rank 0 has come twice" in the_error(told)


def test_the_same_rank_twice_when_all_have_met(clients: Clients) -> None:
    # The run goes on without the one too many.
    assert call_all(clients, {0: card(), 1: card()}) == [place(0, 2), place(1, 2)]
    with pytest.raises(WorldError, match="rank 1 has come twice"):
        membership_check.call(clients(), 1, card(pid=9), WAIT)
    assert "places" in json.loads(clients().get("answer"))


def wait_for(store: dist.Store, *keys: str) -> None:
    deadline = time.monotonic() + 5
    while not store.check(list(keys)):
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_whether_a_rank_came_once(clients: Clients) -> None:
    assert not membership_check.came_once(clients(), 1)
    call_all(clients, {0: card(), 1: card()})
    assert membership_check.came_once(clients(), 1)
    call_all(clients, {1: card()})
    assert not membership_check.came_once(clients(), 1)


# What others say for all.


def test_cancelled_for_those_who_came(clients: Clients) -> None:
    waiting = [
        Party(lambda rank=rank: membership_check.call(clients(), rank, card(size=4), WAIT))
        for rank in (1, 2)
    ]
    wait_for(clients(), "card/1", "card/2")
    membership_check.cancel(clients(), WorldError("node 3 did not come", hint="start it"), 2)
    told = [one.end() for one in waiting]
    assert the_error(told) == "node 3 did not come"
    assert told[0].hint == "start it"


# Cards.


def test_the_card_of_this_process() -> None:
    world = World(rank=1, size=2, local_rank=1, local_size=2, address="h", port=1)
    one = Card.of(world, 7)
    assert (one.pid, one.world, one.place) == (7, 2, place(1, 2))
    assert Card.of(replace(world, placed=False), 7).place is None
    launcher = Card.of_launcher(3, 7)
    assert (launcher.world, launcher.place, launcher.host) == (3, None, one.host)
    assert set(one.versions) == {"lockstep", "python", "torch", "numpy"}


@pytest.mark.parametrize("where", [None, place(1, 4, 1, 2)])
def test_a_card_survives_the_store(where: Place | None) -> None:
    store = dist.HashStore()
    own = card(place=where)
    store.set("card/3", json.dumps(asdict(own)))
    assert membership_check.read(store, 3) == own


def test_a_card_of_another_version_is_read_as_far_as_it_goes() -> None:
    store = dist.HashStore()
    store.set(
        "card/1", json.dumps({"name": "b", "pid": 3, "versions": {"lockstep": "9"}, "new": 1})
    )
    problem = problem_with([card(), membership_check.read(store, 1)])
    assert problem is not None
    assert "rank 1 on b has lockstep 9" in problem[0]


def test_a_world_with_its_place() -> None:
    world = World(rank=3, size=4, local_rank=3, local_size=4, placed=False, address="h", port=1)
    found = membership_check.placed(world, place(1, 2, 1, 2))
    assert found == replace(
        world, placed=True, local_rank=1, local_size=2, node_rank=1, node_count=2
    )
