"""Launchers that come and go, as threads: who meets in which round, and who goes on."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep.errors import UnreachableError, WorldError
from lockstep.launch.agent.failure import Verdict
from lockstep.launch.agent.restarts import GenerationRendezvous
from lockstep.launch.nodes import (
    coordinator,
    join,
    keys,
)
from lockstep.launch.nodes.client import RoundOverError
from lockstep.launch.nodes.config import Nodes, RendezvousConfig, rendezvous_config
from lockstep.launch.nodes.join import Join, order
from lockstep.launch.nodes.keys import JoinEntry, RendezvousKeys
from lockstep.launch.nodes.membership import Common, LaunchEnded, Launcher
from lockstep.launch.nodes.membership_rounds import Rounds
from lockstep.launch.nodes.server import ServerAddress
from lockstep.launch.plan import Generation
from lockstep.world import host
from lockstep.world.rendezvous.membership_check import NodeInfo
from lockstep.world.rendezvous.store import connect_store
from tests.unit import threads
from tests.unit.threads import together


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, seconds in (
        (join, "_SETTLE_SECONDS", 0.4),
        (join, "_CAUTIOUS_SECONDS", 0.8),
        (keys, "_ALIVE_SECONDS", 1.2),
    ):
        monkeypatch.setattr(module, name, seconds)


class Node:
    """One launcher: what the agent would hold."""

    def __init__(self, one: RendezvousConfig, name: str, ranks: int = 1, **terms: Any) -> None:
        self.name = name
        self.said: list[str] = []
        self._stop = threading.Event()
        self.rounds = Rounds(
            replace(one, **{"seconds": 8.0, "last_call": 0.4, **terms}),
            Launcher(ranks=ranks, name=name),
            interface=None,
            check=self._check,
            say=self.said.append,
        )
        self.restart: str | None = None
        self.place = GenerationRendezvous(
            Generation(run_id="id"), 1, self.rounds, policy=self._policy
        )

    def _policy(self, _: Verdict) -> str | None:
        return self.restart

    def _check(self) -> None:
        if self._stop.is_set():
            raise InterruptedError

    def next(self) -> list[str]:
        """Begin the next generation; return who is in it, in order."""
        port = self.place.next_generation(self._check).port
        membership = self.place.membership
        store = connect_store(membership.address, port)
        store.set(f"here/{membership.index}", self.name)
        return [store.get(f"here/{k}").decode() for k in range(membership.count)]

    @property
    def decided(self) -> str | None:
        """What is decided by the time that something is."""
        deadline = time.monotonic() + 5
        assert self.place.coordinator is not None
        while self.place.coordinator.decision is None and time.monotonic() < deadline:
            time.sleep(0.01)
        decision = self.place.coordinator.decision
        return None if decision is None else decision.kind

    def die(self) -> None:
        """End as a process does that is killed: without a word."""
        self._stop.set()
        self.rounds._watch.close()
        self.rounds.server.close()
        if self.place.coordinator is not None:
            self.place.coordinator._stop.set()
            self.place.coordinator._thread.join()

    def end(self) -> None:
        """End as a launcher does."""
        self.place.finish()
        self.rounds.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Let launchers join a launch in a shared directory, each in a thread."""
    made: list[Node] = []

    def join(*names: str, least: int = 1, most: int = 3, **terms: Any) -> list[Any]:
        one = rendezvous_config(
            Nodes(least=least, count=most, endpoint=f"file://{tmp_path}"), ["x"], {}
        )
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


COMMON = Common.new(replicas=1)
CARDS = st.builds(
    lambda token, last, index: card(f"{token}", last, index),
    st.integers(0, 99),
    st.integers(0, 3),
    st.integers(0, 3),
)


def card(token: str, last: int, index: int) -> JoinEntry:
    return JoinEntry(
        token=token,
        node=NodeInfo(host="h", name=token, pid=1, versions={}),
        launcher=Launcher(ranks=1, name=token),
        common=COMMON,
        address=ServerAddress(port=1, token=token),
        round=last,
        index=index,
        generation=0,
    )


@given(st.lists(CARDS), st.integers(1, 5))
def test_those_who_stay_keep_their_order(cards: list[JoinEntry], most: int) -> None:
    found = order(cards, most)
    assert len(found) == min(most, len(cards))
    assert [one.round for one in found] == sorted((one.round for one in cards), reverse=True)[:most]
    staying = [one.index for one in found if one.round == max(one.round for one in cards)]
    assert staying == sorted(staying)


# Rounds.


def test_a_launch_of_one_that_grows_and_shrinks(site: Callable[..., Any]) -> None:
    (a,) = site("a", ranks=2)
    assert generation([a]) == ["a"]
    assert (a.rounds.number, a.place.generation, a.rounds.replicas) == (1, 0, 6)
    assert not a.place.may_leave

    joining = threads.Party(partial(site, "b"))
    assert a.decided == "round"
    again = threads.Party(a.next)
    (b,) = joining.end(10)
    assert b.next() == again.end() == ["a", "b"]
    assert (b.rounds.number, b.place.generation, b.rounds.replicas) == (2, 1, 6)
    assert b.place.may_leave
    assert "lockstep: round 2: 3 ranks by 2 launchers" in a.said[1]
    assert b.said == []

    assert b.place.coordinator is not None
    b.place.coordinator.leave("stopped")
    assert a.decided == b.decided == "round"
    assert generation([a]) == ["a"]
    assert (a.rounds.number, a.place.generation) == (3, 2)


def test_too_few_are_left(site: Callable[..., Any]) -> None:
    a, b = site("a", "b", least=2, most=2, seconds=1.0)
    names = generation([a, b])
    first, second = (a, b) if names[0] == "a" else (b, a)
    second.die()
    assert first.decided == "round"
    with pytest.raises(WorldError, match=r"1 of 2 nodes did not come within 1 s; came: [ab]"):
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
        node.place.coordinator.done()
    assert a.decided == b.decided == "done"
    assert together(a.end, b.end) == [None, None]
    (c,) = waiting.end(10)
    assert isinstance(c, LaunchEnded)


def test_all_that_ran_are_gone_and_one_that_waits_goes_on(site: Callable[..., Any]) -> None:
    nodes = site("a", "b", most=2)
    generation(nodes)
    waiting = threads.Party(partial(site, "c", most=2))
    time.sleep(0.3)
    assert together(*(node.die for node in nodes)) == [None, None]
    (c,) = waiting.end(10)
    assert c.next() == ["c"]
    assert c.rounds.number == 2
    assert c.rounds.common == nodes[0].rounds.common, "the same run goes on"


@pytest.mark.parametrize("is_late", [False, True])
def test_of_three_at_once_the_third_waits_for_the_round_of_the_others(
    is_late: bool, site: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has seen no round, and round 1 starts without it: after its arrival, or before."""
    close, approach = RendezvousKeys.close, Rounds._approach

    def close_in_time(
        own: RendezvousKeys, number: int, cards: Sequence[JoinEntry], token: str
    ) -> None:
        if is_late or own.arrived(1) == 3:
            close(own, number, cards, token)

    def approach_early(own: Rounds) -> Any:
        found = approach(own)
        while is_late and own._own.name == "c" and own.keys.newest()[0] == 0:
            time.sleep(0.01)
        return found

    monkeypatch.setattr(RendezvousKeys, "close", close_in_time)
    monkeypatch.setattr(Rounds, "_approach", approach_early)
    coming = [threads.Party(partial(site, name, most=2)) for name in "abc"]
    time.sleep(2)  # longer than a launcher waits that may start a round
    found = [one.end(0.1) for one in coming]
    (third,) = (k for k, one in enumerate(found) if isinstance(one, TimeoutError))
    founders = [node for one in found if isinstance(one, list) for node in one]
    assert len(generation(founders)) == 2
    together(*(node.die for node in founders))
    (spare,) = coming[third].end()
    assert spare.rounds.number == 2
    assert spare.rounds.common == founders[0].rounds.common, "the same run goes on"


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
    reaches = second.rounds.keys.reaches
    monkeypatch.setattr(
        second.rounds.keys, "reaches", lambda number: not is_cut.is_set() and reaches(number)
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
    assert node.place.coordinator is not None
    caller = node.place.coordinator._connection
    assert caller is not None
    caller.send = lambda report: None  # type: ignore[method-assign]
    caller.close()


def test_one_that_was_overtaken_stops(site: Callable[..., Any]) -> None:
    (a,) = site("a")
    generation([a])
    a.rounds.keys.close(2, [], "b")
    assert a.decided == "round"
    assert generation([a]) == ["a"]
    assert a.rounds.number == 3


@pytest.mark.parametrize("newest", ["", '[2, "others"]'])
def test_a_launcher_of_another_lockstep_does_not_stop_the_watch(
    newest: str, site: Callable[..., Any]
) -> None:
    (a,) = site("a")
    generation([a])
    own = a.rounds.keys
    before = own.store.get("newest").decode()
    own.store.set("round/2/card/0", "{}")
    own.store.set("others", "[{}]")
    own.store.set("newest", newest or before)
    for loss in range(2):  # the second answer comes from a second look
        own.store.set(f"round/1/loss/{loss}", "-1")
        deadline = time.monotonic() + 5
        while not own.store.check([f"round/1/alive/{loss}"]):
            assert time.monotonic() < deadline, "the watch has ended"
            time.sleep(0.01)
    own.store.set("newest", '[2, "none"]')
    assert a.decided == "round", "it hears that it was overtaken"


# Many that join at once.


class Counting:
    """A store that notes which cards its user reads."""

    def __init__(self, store: Any) -> None:
        self._store, self.cards = store, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get(self, key: str) -> bytes:
        if "/card/" in key:
            self.cards.append(key)
        return bytes(self._store.get(key))


def joins(store: Any, index: int, *, number: int = 1, expected: Sequence[str] = ()) -> Join:
    """Make the wait of launcher `index` of five."""
    return Join(
        RendezvousKeys(store, lambda: None),
        number,
        card(f"{index}", number - 1, index),
        expected,
        may_close=True,
        config=RendezvousConfig(name="x", count=5, address="x", source="", seconds=9.0),
        hint=str,
    )


@pytest.mark.parametrize(("arrival", "starts"), [(3, True), (4, False)])
def test_four_launchers_read_the_cards_of_all(arrival: int, starts: bool) -> None:
    """All five have joined, of which one looks: the fourth starts the round, the fifth waits."""
    store = dist.HashStore()
    for index in range(5):
        RendezvousKeys(store, lambda: None).arrive(1, card(f"{index}", 0, index))
    user = Counting(store)
    one = joins(user, arrival)
    one._keys.arrive = lambda *_: arrival  # type: ignore[method-assign]
    waiting = threads.Party(one.wait)
    found = waiting.end(0.5)
    assert isinstance(found, tuple if starts else TimeoutError)
    assert len(user.cards) == (5 if starts else 0)
    RendezvousKeys(store, lambda: None).close(1, [card(f"{k}", 0, k) for k in range(5)], "0")
    assert [one.token for one in waiting.end()] == list("01234")


def test_the_last_round_says_who_reads_the_cards() -> None:
    """Launchers that waited for a place have joined before those of the last round."""
    store = dist.HashStore()
    users = [Counting(store) for _ in range(5)]
    for spare in "abcd":
        RendezvousKeys(store, lambda: None).arrive(2, card(spare, 0, 5))
    expected = tuple("01234")
    calls = [joins(user, k, number=2, expected=expected).wait for k, user in enumerate(users)]
    found = together(*calls)
    assert [[one.token for one in cards] for cards in found] == [list("01234")] * 5


def test_the_fifth_starts_the_round_if_the_first_four_are_dead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(join, "_LOOK_SECONDS", 0.2)
    store = dist.HashStore()
    for index in range(4):
        RendezvousKeys(store, lambda: None).arrive(1, card(f"{index}", 0, index))
    fifth = joins(store, 4)
    fifth._config = replace(fifth._config, last_call=0.2)
    assert [one.token for one in fifth.wait() or ()] == list("01234")


# What does not fit.


def test_versions_that_differ(site: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (a,) = site("a")
    generation([a])
    monkeypatch.setattr(host, "versions", lambda: {"torch": "0.1"})
    (found,) = site("b")
    assert isinstance(found, WorldError)
    assert "b has " in found.message
    assert "expected the same on all nodes" in found.message
    assert a.place.coordinator is not None
    assert a.place.coordinator.decision is None, "those who run are not disturbed"


# At a host.


def test_the_host_of_the_store_is_the_first_and_ends_the_launch(
    request: pytest.FixtureRequest,
) -> None:
    named = Nodes(least=1, count=3, endpoint="127.0.0.1", id=f"{request.node.name}{time.time()}")
    one = rendezvous_config(named, ["x"], {})
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
    """A store whose user dies before one of its writes."""

    def __init__(self, store: Any, writes: int) -> None:
        self._store, self._left = store, writes

    def __getattr__(self, name: str) -> Any:
        if name in ("set", "compare_set"):
            if self._left == 0:
                raise InterruptedError
            self._left -= 1
        return getattr(self._store, name)


@pytest.mark.parametrize("writes", [0, 1, 2])
def test_a_round_begins_with_all_launchers_or_not_at_all(writes: int) -> None:
    store = dist.HashStore()
    mortal: Any = Mortal(store, writes)
    with contextlib.suppress(InterruptedError):
        RendezvousKeys(mortal, lambda: None).close(1, [card("a", 0, 0)], "a")
    seen = RendezvousKeys(store, lambda: None)
    if writes < 2:
        assert seen.newest() == (0, ())
        seen.close(1, [card("b", 0, 0)], "b")
    assert [one.token for one in seen.closed(1) or ()] == ["a" if writes == 2 else "b"]


def test_a_closer_that_was_stopped_does_not_undo_a_newer_round() -> None:
    seen = RendezvousKeys(dist.HashStore(), lambda: None)
    seen.close(2, [card("b", 0, 0)], "b")
    seen.close(1, [card("a", 0, 0)], "a")
    assert seen.newest()[0] == 2
    assert [one.token for one in seen.closed(2) or ()] == ["b"]


# A launch with one round.


@pytest.fixture(params=["numbers", "endpoint", "directory"])
def configs(
    request: pytest.FixtureRequest, tmp_path: Path, launch_id: str
) -> Callable[[int], list[RendezvousConfig]]:
    """Make the configurations of launchers that find each other in one of three ways."""

    def make(count: int) -> list[RendezvousConfig]:
        if request.param == "numbers":
            return numbered(count, launch_id)
        where = "127.0.0.1" if request.param == "endpoint" else f"file://{tmp_path}"
        return at_endpoint(count, launch_id, where)

    return make


@pytest.fixture
def launch_id(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name}/{time.time_ns()}".replace("/", "-")


def config(**nodes: Any) -> RendezvousConfig:
    one = rendezvous_config(Nodes(**nodes), ["x"], {})
    assert one is not None
    return one


def numbered(count: int, launch_id: str) -> list[RendezvousConfig]:
    where = {"count": count, "main_address": "127.0.0.1", "id": launch_id}
    return [config(rank=rank, **where) for rank in range(count)]


def at_endpoint(count: int, launch_id: str, endpoint: str) -> list[RendezvousConfig]:
    return [config(count=count, endpoint=endpoint, id=launch_id)] * count


def meet(one: RendezvousConfig, ranks: int = 1, seconds: float = 8.0, **changes: Any) -> Rounds:
    changes = {"interface": None, "check": lambda: None, "say": lambda _: None, **changes}
    return Rounds(
        replace(one, seconds=seconds),
        Launcher(ranks=ranks, name="hosta", cpus=(ranks,)),
        **changes,
    )


def join_all(launchers: list[RendezvousConfig], **changes: Any) -> list[Any]:
    """Let launcher k of `launchers` come with k + 1 ranks."""
    calls = [partial(meet, one, k + 1, **changes) for k, one in enumerate(launchers)]
    return together(*calls, seconds=15)


def check_met(told: list[Any]) -> list[Rounds]:
    """Check that launchers agree on who they are, and begin a generation; return them in order."""
    assert all(isinstance(one, Rounds) for one in told), told
    launchers: list[Rounds] = sorted(told, key=lambda one: one.membership.index)
    assert [one.membership.index for one in launchers] == list(range(len(told)))
    assert (
        len({(one.membership.ranks, one.membership.names, one.membership.address) for one in told})
        == 1
    )
    assert [one.common for one in launchers] == [launchers[0].common] * len(told)
    places = [GenerationRendezvous(Generation(run_id="id"), 1, one) for one in launchers]
    for generation in range(2):
        told = together(*(place.next_generation for place in places))
        assert [one.number for one in told] == [generation] * len(places)
        assert len({one.port for one in told}) == 1, told
        store = connect_store(launchers[0].membership.address, told[0].port)
        assert not store.check(["note"])
        store.set("note", f"{generation}")
    assert {one.replicas for one in launchers} == {None}
    assert not places[0].may_leave
    for place in places:
        assert place.coordinator is not None
        place.coordinator.done()
    together(*(place.finish for place in places))
    for one in launchers:
        one.close()
    return launchers


def test_launchers_of_one_host_meet_once(
    configs: Callable[[int], list[RendezvousConfig]], tmp_path: Path
) -> None:
    membership = check_met(join_all(configs(3)))[0].membership
    assert sorted(membership.ranks) == [1, 2, 3]
    assert (membership.nodes, membership.address, membership.interface) == (
        (0, 0, 0),
        "127.0.0.1",
        None,
    )
    assert membership.names == ("node 0 (hosta)", "node 1 (hosta)", "node 2 (hosta)")
    assert (membership.own_cores, membership.own_gpus) == (True, False)
    assert membership.speaks
    assert list(tmp_path.iterdir()) == []


def test_two_launches_at_one_place(
    configs: Callable[[int], list[RendezvousConfig]],
) -> None:
    ours = configs(2)
    theirs = [replace(one, name=f"{one.name}-theirs" + "ä" * 40) for one in ours]
    told = join_all([*ours, *theirs])
    check_met(told[:2])
    check_met(told[2:])


def test_one_too_many_in_a_directory(launch_id: str, tmp_path: Path) -> None:
    one = at_endpoint(2, launch_id, f"file://{tmp_path}")[0]
    met = join_all([one, one])
    with pytest.raises(WorldError, match=r"2 nodes have joined at .* already") as caught:
        meet(one)
    assert "--rdzv-id" in str(caught.value.hint)
    check_met(met)


def test_a_stray_of_another_version_does_not_disturb_a_launch(
    launch_id: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = at_endpoint(2, launch_id, f"file://{tmp_path}")[0]
    met = join_all([one, one])
    with monkeypatch.context() as patch:
        patch.setattr(host, "versions", lambda: {"torch": "0.1"})
        with pytest.raises(WorldError, match=r"hosta has "):
            meet(one)
    check_met(met)


class Gone:
    """A store that is gone."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}: Broken pipe")


def test_a_launch_that_has_begun_does_not_need_the_store_where_it_met(
    launch_id: str, tmp_path: Path
) -> None:
    met = join_all(at_endpoint(2, launch_id, f"file://{tmp_path}"))
    met.sort(key=lambda one: one.membership.index)
    places = [GenerationRendezvous(Generation(run_id="id"), 1, one) for one in met]
    together(*(place.next_generation for place in places))
    gone: Any = Gone()
    for one in met:
        one.keys.store = gone
    told = together(*(one.next_generation for one in places))
    assert all(isinstance(one, Generation) for one in told), told
    for place in places:
        assert place.coordinator is not None
        place.coordinator.done()
    deadline = time.monotonic() + 5
    while not all(one.coordinator and one.coordinator.decision for one in places):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert together(*(place.finish for place in places)) == [None, None]
    for one in met:
        one.close()


def test_a_launcher_counts_once_among_those_that_heard() -> None:
    store = dist.HashStore()
    one = RendezvousKeys(store, lambda: None)
    one.fail(1, WorldError("too few"))
    for _ in range(2):
        with pytest.raises(WorldError, match="too few"):
            one.check_failed(1)
    assert store.add("round/1/heard", 0) == 1


def test_being_stopped(configs: Callable[[int], list[RendezvousConfig]], tmp_path: Path) -> None:
    began = time.monotonic()

    def stop() -> None:
        if time.monotonic() - began > 0.3:
            raise InterruptedError

    for one in configs(2):
        began = time.monotonic()
        with pytest.raises(InterruptedError):
            meet(one, check=stop)
        assert time.monotonic() - began < 5
    assert list(tmp_path.iterdir()) == []


def test_launcher_0_is_stopped_while_others_wait(launch_id: str) -> None:
    stopped = threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise InterruptedError

    def hosting() -> str:
        with contextlib.suppress(InterruptedError):
            meet(first, check=check)
        return "stopped, and its store with it"

    first, second, _ = numbered(3, launch_id)
    both = threads.Party(hosting), threads.Party(partial(meet, second))
    time.sleep(0.3)
    stopped.set()
    assert both[0].end() == "stopped, and its store with it"
    assert "the node that hosts the rendezvous has left" in str(both[1].end())
