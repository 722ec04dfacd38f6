"""Launchers that come and go, as threads: who meets in which round, and who goes on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import UnreachableError, WorldError
from lockstep.launch import (
    coordinator,
    coordinator_client,
    coordinator_server,
    elastic_rendezvous,
    join,
    rendezvous,
    rendezvous_keys,
)
from lockstep.launch.coordinator_client import RoundOverError
from lockstep.launch.elastic_rendezvous import ElasticRendezvous
from lockstep.launch.join import Terms, order
from lockstep.launch.membership import Launcher, NotNeeded
from lockstep.launch.nodes import Nodes, RendezvousConfig, party
from lockstep.launch.rendezvous import Rendezvous
from lockstep.launch.rendezvous_keys import Card, RendezvousKeys
from lockstep.world import host
from tests.unit import threads
from tests.unit.threads import together


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, seconds in (
        (join, "_SETTLE_SECONDS", 0.4),
        (join, "_CAUTIOUS_SECONDS", 0.8),
        (join, "_LOOK_SECONDS", 0.3),
        (join, "_PAUSE", 0.01),
        (rendezvous_keys, "_OPENING_SECONDS", 2.0),
        (rendezvous_keys, "_ALIVE_SECONDS", 0.4),
        (elastic_rendezvous, "_APPROACH_SECONDS", 0.05),
        (rendezvous, "_LOOK_SECONDS", 0.05),
        (coordinator_client, "_BEAT_SECONDS", 0.05),
        (coordinator_client, "_REFUSED_SECONDS", 0.2),
        (coordinator, "_GONE_SECONDS", 0.3),
        (coordinator_server, "_LINGER_SECONDS", 0.3),
    ):
        monkeypatch.setattr(module, name, seconds)


class Node:
    """One launcher: what the agent would hold."""

    def __init__(self, one: RendezvousConfig, name: str, **terms: Any) -> None:
        self.name = name
        self.said: list[str] = []
        wanted = {"least": one.least, "most": one.count, "seconds": 8.0, "last_call": 0.4}
        self._stop = threading.Event()
        self.rounds = ElasticRendezvous(
            one,
            Launcher(ranks=terms.pop("ranks", 1), name=name),
            Terms(**{**wanted, **terms}),
            interface=None,
            check=self._check,
            say=self.said.append,
        )
        self.place = Rendezvous("id", 1, self.rounds, check=self._check)

    def _check(self) -> None:
        if self._stop.is_set():
            raise InterruptedError

    def next(self) -> list[str]:
        """Begin the next generation; return who is in it, in order."""
        self.place.next_generation()
        store, roster = self.place.store, self.place.roster
        store.set(f"here/{roster.index}", self.name)
        return [store.get(f"here/{k}").decode() for k in range(roster.count)]

    @property
    def decided(self) -> str | None:
        """What is decided by the time that something is."""
        deadline = time.monotonic() + 5
        assert self.place.neighbours is not None
        while self.place.neighbours.decision is None and time.monotonic() < deadline:
            time.sleep(0.01)
        decision = self.place.neighbours.decision
        return None if decision is None else decision.kind

    def die(self) -> None:
        """End as a process does that is killed: without a word."""
        self._stop.set()
        if self.place._watch is not None:
            self.place._watch.close()
        if self.place.neighbours is not None:
            self.place.neighbours._stop.set()
            self.place.neighbours._thread.join()
            if self.place.neighbours.hall is not None:
                self.place.neighbours.hall._closed.set()
                self.place.neighbours.hall._thread.join()

    def end(self) -> None:
        """End as a launcher does."""
        self.place.finish()
        self.rounds.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Let launchers join a launch in a shared directory, each in a thread."""
    made: list[Node] = []

    def join(*names: str, least: int = 1, most: int = 3, **terms: Any) -> list[Any]:
        one = party(Nodes(least=least, count=most, endpoint=f"file://{tmp_path}"), ["x"], {})
        assert one is not None
        found = together(*(partial(Node, one, name, **terms) for name in names), seconds=15)
        made.extend(node for node in found if isinstance(node, Node))
        return found

    yield join
    for node in made:
        node.die()
        node.rounds.close()


def generation(nodes: list[Node]) -> list[str]:
    """Begin a generation with nodes that agree on who is in it; return who is."""
    found = together(*(node.next for node in nodes), seconds=15)
    assert all(isinstance(one, list) for one in found), found
    assert [one == found[0] for one in found] == [True] * len(found), found
    return list(found[0])


# Order.


CARDS = st.builds(
    lambda token, last, index: card(f"{token}", last, index),
    st.integers(0, 99),
    st.integers(0, 3),
    st.integers(0, 3),
)


def card(token: str, last: int, index: int) -> Card:
    launcher = Launcher(ranks=1, name=token)
    return Card(token=token, host="h", launcher=launcher, round=last, index=index, generation=0)


@given(st.lists(CARDS), st.integers(1, 5))
def test_those_who_stay_keep_their_order(cards: list[Card], most: int) -> None:
    found = order(cards, most)
    assert len(found) == min(most, len(cards))
    assert [one.round for one in found] == sorted((one.round for one in cards), reverse=True)[:most]
    staying = [one.index for one in found if one.round == max(one.round for one in cards)]
    assert staying == sorted(staying)


# ElasticRendezvous.


def test_a_launch_of_one_that_grows_and_shrinks(site: Callable[..., Any]) -> None:
    (a,) = site("a", ranks=2)
    assert generation([a]) == ["a"]
    assert (a.rounds.number, a.place.generation, a.place.replicas) == (1, 0, 6)
    assert not a.place.may_leave

    joining = threads.Party(partial(site, "b"))
    assert a.decided == "round"
    again = threads.Party(a.next)
    (b,) = joining.end(10)
    assert b.next() == again.end() == ["a", "b"]
    assert (b.rounds.number, b.place.generation, b.place.replicas) == (2, 1, 6)
    assert b.place.may_leave
    assert "lockstep: round 2: 3 ranks by 2 launchers" in a.said[1]
    assert b.said == []

    assert b.place.neighbours is not None
    b.place.neighbours.leave("stopped")
    assert a.decided == b.decided == "round"
    assert generation([a]) == ["a"]
    assert (a.rounds.number, a.place.generation) == (3, 2)


def test_a_restart_keeps_the_round(site: Callable[..., Any]) -> None:
    nodes = site("a", "b", most=2)
    before = generation(nodes)
    for node in nodes:
        node.place.policy = lambda _: "again"
    assert generation(nodes) == before
    assert [(node.rounds.number, node.place.generation) for node in nodes] == [(1, 1)] * 2


def test_the_first_is_lost_for_good(site: Callable[..., Any]) -> None:
    nodes = {node.name: node for node in site("a", "b", "c")}
    names = generation(list(nodes.values()))
    first, *others = (nodes[name] for name in names)
    first.die()
    assert [node.decided for node in others] == ["round", "round"]
    assert generation(others) == names[1:], "the second is the first now"
    assert others[0].place.generation == 1

    others[0].place.neighbours.done()
    others[1].place.neighbours.done()
    assert [node.decided for node in others] == ["done", "done"]


def test_too_few_are_left(site: Callable[..., Any]) -> None:
    a, b = site("a", "b", least=2, most=2, seconds=1.0)
    names = generation([a, b])
    first, second = (a, b) if names[0] == "a" else (b, a)
    second.die()
    assert first.decided == "round"
    with pytest.raises(WorldError, match=r"1 node\(s\) came within 1 s; expected at least 2; came"):
        first.next()


def test_one_that_waits_for_a_place_gets_it(site: Callable[..., Any]) -> None:
    a, b = site("a", "b", most=2)
    names = generation([a, b])
    waiting = threads.Party(partial(site, "c", most=2, seconds=0.5))
    assert isinstance(waiting.end(1.0), TimeoutError), "a spare waits without limit"
    first, second = (a, b) if names[0] == "a" else (b, a)
    second.die()
    assert first.decided == "round"
    again = threads.Party(first.next)
    (c,) = waiting.end(10)
    assert c.next() == again.end() == [first.name, "c"]


def test_one_that_waits_for_a_place_until_the_end(site: Callable[..., Any]) -> None:
    a, b = site("a", "b", most=2)
    generation([a, b])
    waiting = threads.Party(partial(site, "c", most=2))
    time.sleep(0.2)
    for node in (a, b):
        node.place.neighbours.done()
    assert a.decided == b.decided == "done"
    assert together(a.end, b.end) == [None, None]
    (c,) = waiting.end(10)
    assert isinstance(c, NotNeeded)


def test_all_that_ran_are_gone_and_one_that_waits_goes_on(site: Callable[..., Any]) -> None:
    nodes = site("a", "b", most=2)
    generation(nodes)
    waiting = threads.Party(partial(site, "c", most=2))
    time.sleep(0.3)
    assert together(*(node.die for node in nodes)) == [None, None]
    (c,) = waiting.end(10)
    assert c.next() == ["c"]
    assert (c.rounds.number, c.rounds.leads) == (2, True)


@pytest.mark.parametrize("comes_back", [False, True])
def test_of_two_halves_one_goes_on(
    comes_back: bool, site: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second cannot reach the first any more, which lives: it must not go on without it."""
    monkeypatch.setattr(coordinator, "LOST_SECONDS", 0.5)
    a, b = site("a", "b", seconds=1.5)
    names = generation([a, b])
    first, second = (a, b) if names[0] == "a" else (b, a)
    cut(second)
    is_cut = threading.Event()
    is_cut.set()
    reaches = second.rounds.board.reaches
    monkeypatch.setattr(
        second.rounds.board, "reaches", lambda number: not is_cut.is_set() and reaches(number)
    )
    assert second.decided == "round"
    cut_off = threads.Party(second.next)
    assert first.decided == "round"
    assert first.next() == [first.name]
    if comes_back:
        is_cut.clear()
        assert first.decided == "round"
        assert first.next() == cut_off.end() == [first.name, second.name]
    else:
        found = cut_off.end()
        assert isinstance(found, UnreachableError)
        assert f"{second.name} is cut off: launcher 0 of round" in found.message


def cut(node: Node) -> None:
    """Pull the cable of a launcher that is not the first."""
    assert node.place.neighbours is not None
    caller = node.place.neighbours._caller
    assert caller is not None
    caller.ask = lambda _: None  # type: ignore[method-assign]
    caller.close()


def test_one_that_was_overtaken_stops(site: Callable[..., Any]) -> None:
    (a,) = site("a")
    generation([a])
    a.rounds.board.close(2, [])
    assert a.decided == "round"
    assert generation([a]) == ["a"]
    assert a.rounds.number == 3


# What does not fit.


def test_versions_that_differ(site: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (a,) = site("a")
    generation([a])
    monkeypatch.setattr(host, "versions", lambda: {"torch": "0.1"})
    (found,) = site("b")
    assert isinstance(found, WorldError)
    assert "b has " in found.message
    assert "expected the same on all nodes" in found.message
    assert a.place.neighbours is not None
    assert a.place.neighbours.decision is None, "those who run are not disturbed"


def test_too_few_come(site: Callable[..., Any]) -> None:
    (found,) = site("a", least=2, most=3, seconds=0.4)
    assert isinstance(found, WorldError)
    assert "1 node(s) came within 0.4 s; expected at least 2; came: a" in found.message


def test_launcher_0_cannot_start(site: Callable[..., Any]) -> None:
    nodes = site("a", "b", most=2)
    first, second = sorted(nodes, key=lambda node: node.rounds.roster.index)
    assert first.rounds.leads
    assert not second.rounds.leads
    hearing = threads.Party(lambda: second.rounds.hear("directory"))
    first.rounds.fail(WorldError("the disk is full"))
    found = hearing.end()
    assert isinstance(found, WorldError)
    assert "cannot start: the disk is full" in found.message


# At a host.


def test_the_host_of_the_store_is_the_first_and_ends_the_launch(
    request: pytest.FixtureRequest,
) -> None:
    named = Nodes(least=1, count=3, endpoint="127.0.0.1", id=f"{request.node.name}{time.time()}")
    one = party(named, ["x"], {})
    assert one is not None
    a = Node(one, "a")
    assert a.next() == ["a"]
    joining = threads.Party(partial(Node, one, "b"))
    assert a.decided == "round"
    again = threads.Party(a.next)
    b = joining.end(10)
    assert b.next() == again.end() == ["a", "b"]
    a.die()
    assert b.decided == "end"
    with pytest.raises(RoundOverError) as over:
        b.next()
    verdict = over.value.decision.verdict
    assert verdict is not None
    assert "node 0 (a) was lost" in verdict.text
    assert "hint: launchers that meet in a shared directory survive it" in verdict.text
    b.end()
    a.rounds.close()


class Mortal:
    """A store whose user dies after its first write."""

    def __init__(self, store: Any) -> None:
        self._store, self._writes = store, 0

    def __getattr__(self, name: str) -> Any:
        if name in ("set", "compare_set"):
            self._writes += 1
            if self._writes > 1:
                raise InterruptedError
        return getattr(self._store, name)


def a_card(token: str) -> Card:
    launcher = Launcher(ranks=1, name=token)
    return Card(token=token, host="h", launcher=launcher, round=0, index=0, generation=0)


def test_a_round_begins_with_one_write() -> None:
    store = dist.HashStore()
    mortal: Any = Mortal(store)
    with contextlib.suppress(InterruptedError):
        RendezvousKeys(mortal, lambda: None).close(1, [a_card("a")])
    seen = RendezvousKeys(store, lambda: None)
    assert (seen.newest() == 1) == (seen.closed(1) is not None)


def test_a_closer_that_was_stopped_does_not_undo_a_newer_round() -> None:
    seen = RendezvousKeys(dist.HashStore(), lambda: None)
    seen.close(2, [a_card("b")])
    seen.close(1, [a_card("a")])
    assert seen.newest() == 2
    assert [one.token for one in seen.closed(2) or ()] == ["b"]


def test_a_launcher_0_whose_thread_is_stuck_is_taken_for_lost(
    site: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coordinator_client, "_STUCK_SECONDS", 0.3)
    monkeypatch.setattr(coordinator_client, "_LOOK_SECONDS", 0.1)
    monkeypatch.setattr(rendezvous_keys, "_ALIVE_SECONDS", 1.5)
    nodes = site("a", "b")
    generation(nodes)  # in threads that have ended by now: nothing moves any more
    asks = nodes[1].rounds.board
    deadline = time.monotonic() + 20
    while not asks.has_ended(1, 1):
        assert time.monotonic() < deadline, "a thread beside it answers for it"
        time.sleep(0.05)
