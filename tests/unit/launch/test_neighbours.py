"""Launchers that watch each other: one verdict for all of them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import cast

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lockstep.launch import neighbours
from lockstep.launch.failure import Verdict
from lockstep.launch.neighbours import Neighbours, Told
from lockstep.launch.roster import Roster
from tests.unit.threads import Party, together

Maker = Callable[..., Neighbours]


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {
        "_BEAT_SECONDS": 0.1,
        "_INTERVAL": 0.01,
        "_SETTLE_SECONDS": 0.2,
        "_LINGER_SECONDS": 0.1,
    }.items():
        monkeypatch.setattr(neighbours, name, seconds)


@pytest.fixture
def store() -> dist.Store:
    return dist.HashStore()


@pytest.fixture
def make(store: dist.Store) -> Iterator[Maker]:
    """Make launchers of a launch; they have ended when the test has."""
    made: list[Neighbours] = []

    def one(index: int, count: int = 3, *, speaks: bool = True) -> Neighbours:
        made.append(Neighbours(cast("dist.TCPStore", store), roster(index, count, speaks=speaks)))
        return made[-1]

    yield one
    for launcher in reversed(made):
        launcher.close()
        launcher._thread.join(5)
        assert not launcher._thread.is_alive()


def roster(index: int, count: int, *, speaks: bool = True) -> Roster:
    return Roster(
        index=index,
        ranks=(1,) * count,
        nodes=tuple(range(count)),
        names=tuple(f"node {k} (host{k})" for k in range(count)),
        address="127.0.0.1",
        interface=None,
        speaks=speaks,
    )


def verdict(rank: int) -> Verdict:
    return Verdict(text=f"rank {rank} failed", exit_code=1, rank=rank, traceback="Traceback …")


def cause(rank: int, when: float = 1.0) -> Told:
    return Told(verdict=verdict(rank), consequence=False, time=when)


def consequence(rank: int, when: float = 1.0) -> Told:
    return Told(verdict=verdict(rank), consequence=True, time=when)


def problem_of(launcher: Neighbours, seconds: float = 5) -> Verdict | None:
    deadline = time.monotonic() + seconds
    while launcher.problem is None and time.monotonic() < deadline:
        time.sleep(0.005)
    return launcher.problem


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def has_failed(store: dist.Store, index: int) -> bool:
    key = f"neighbours/{index}"
    return store.check([key]) and json.loads(store.get(key))["failure"] is not None


# What is said.


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 9)), min_size=1))
def test_causes_come_before_consequences_and_early_before_late(
    told: list[tuple[bool, float]],
) -> None:
    all_told = [Told(verdict=verdict(0), consequence=one, time=when) for one, when in told]
    first = min(all_told, key=lambda one: one.order)
    assert not first.consequence or all(one.consequence for one in all_told)
    assert all(one.time >= first.time for one in all_told if one.consequence == first.consequence)


# All goes well.


@pytest.mark.parametrize("count", [2, 3])
def test_all_are_done_when_each_is(count: int, make: Maker) -> None:
    launchers = [make(index, count) for index in range(count)]
    for one in launchers[:-1]:
        one.done()
    time.sleep(0.1)
    assert not any(one.all_done for one in launchers)
    launchers[-1].done()
    wait_until(lambda: all(one.all_done for one in launchers))
    assert [one.problem for one in launchers] == [None] * count


def test_who_comes_late_is_waited_for(make: Maker) -> None:
    first, second = make(0), make(1)
    first.done()
    second.done()
    time.sleep(0.1)
    assert not first.all_done
    third = make(2)
    third.done()
    wait_until(lambda: first.all_done and second.all_done and third.all_done)


# One fails.


@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_cause_is_everybodys_verdict_at_once(index: int, make: Maker) -> None:
    launchers = [make(k) for k in range(3)]
    launchers[index].fail(cause(7))
    assert [problem_of(one) for one in launchers] == [verdict(7)] * 3
    assert not any(one.all_done for one in launchers)


def test_a_failure_wins_over_others_that_are_done(make: Maker) -> None:
    launchers = [make(k) for k in range(3)]
    launchers[0].done()
    launchers[1].done()
    launchers[2].fail(cause(2))
    assert [problem_of(one) for one in launchers] == [verdict(2)] * 3


def test_the_earliest_cause_wins(make: Maker, store: dist.Store) -> None:
    late, early = make(1), make(2)
    late.fail(cause(1, when=20.0))
    early.fail(cause(2, when=10.0))
    wait_until(lambda: has_failed(store, 1) and has_failed(store, 2))
    assert problem_of(make(0)) == verdict(2)


def test_a_cause_wins_over_earlier_consequences(make: Maker) -> None:
    launchers = [make(k) for k in range(3)]
    launchers[0].fail(consequence(0, when=1.0))
    launchers[2].fail(consequence(2, when=2.0))
    time.sleep(0.1)
    launchers[1].fail(cause(1, when=3.0))
    assert [problem_of(one) for one in launchers] == [verdict(1)] * 3


def test_a_cause_that_never_comes_is_not_waited_for(make: Maker) -> None:
    launchers = [make(k) for k in range(3)]
    launchers[2].fail(consequence(2, when=2.0))
    launchers[1].fail(consequence(1, when=1.0))
    time.sleep(0.1)
    assert launchers[1].problem is None
    assert [problem_of(one) for one in launchers] == [verdict(1)] * 3


def test_consequences_of_all_need_no_wait(make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_SETTLE_SECONDS", 60.0)
    launchers = [make(k) for k in range(3)]
    for index, one in enumerate(launchers):
        one.fail(consequence(index, when=9.0 - index))
    assert [problem_of(one) for one in launchers] == [verdict(2)] * 3


def test_only_one_launcher_speaks_where_they_share_their_output(make: Maker) -> None:
    first, second = make(0, 2), make(1, 2, speaks=False)
    second.fail(cause(1))
    assert problem_of(first) == verdict(1)
    assert problem_of(second) == replace(verdict(1), text="")


def test_a_verdict_survives_any_text(make: Maker) -> None:
    first, second = make(0, 2), make(1, 2)
    odd = Verdict(text="é\n\udcff\0 '\"", exit_code=137, rank=3, traceback=None)
    second.fail(Told(verdict=odd, consequence=False, time=1.0))
    assert problem_of(first) == problem_of(second) == odd


# One is lost.


@pytest.fixture
def lost_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours, "_LOST_SECONDS", 0.4)


def test_a_launcher_that_never_came_is_lost(make: Maker, lost_soon: None) -> None:
    launchers = [make(0), make(2)]
    for one in launchers:
        found = problem_of(one)
        assert found is not None
        assert found.text.startswith("lockstep: node 1 (host1) was lost: no sign of its launcher")
        assert (found.exit_code, found.rank) == (1, -1)


def test_a_launcher_that_falls_silent_is_lost(make: Maker, lost_soon: None) -> None:
    launchers = [make(k) for k in range(3)]
    time.sleep(0.5)
    assert [one.problem for one in launchers] == [None] * 3
    launchers[2]._stop.set()  # as if its process were gone
    for one in launchers[:2]:
        found = problem_of(one)
        assert found is not None
        assert "node 2 (host2) was lost" in found.text


def test_one_that_is_done_and_falls_silent_is_lost_too(make: Maker, lost_soon: None) -> None:
    first, second = make(0, 2), make(1, 2)
    second.done()
    time.sleep(0.1)
    second._stop.set()
    assert "node 1 (host1) was lost" in str(problem_of(first))


def test_a_failure_wins_over_a_loss(make: Maker, lost_soon: None) -> None:
    first, second = make(0), make(1)
    time.sleep(0.1)
    second.fail(consequence(1))
    assert problem_of(first) == verdict(1)


def test_launcher_0_that_falls_silent_is_lost(make: Maker, lost_soon: None) -> None:
    # It hosts the store, and may hang without the connection being cut.
    launcher = make(1)
    stuck = threading.Event()
    launcher._listen = lambda: stuck.wait(5) and None  # type: ignore[method-assign]
    found = problem_of(launcher)
    stuck.set()
    assert found is not None
    assert "node 0 (host0) was lost" in found.text


def test_a_store_that_is_gone_means_that_launcher_0_is(lost_soon: None) -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    launcher = Neighbours(host, roster(1, 2))
    time.sleep(0.05)
    del host
    found = problem_of(launcher)
    launcher.close()
    assert found is not None
    assert "node 0 (host0) was lost" in found.text


# The end.


def test_launcher_0_stays_until_the_others_have_read(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neighbours, "_LINGER_SECONDS", 5.0)
    first, second = make(0, 2), make(1, 2)
    reading = threading.Event()
    listen = second._listen
    second._listen = lambda: reading.wait(5) and listen()  # type: ignore[method-assign,func-returns-value]
    first.fail(cause(0))
    assert problem_of(first) == verdict(0)
    closing = Party(first.close)
    time.sleep(0.1)
    assert isinstance(closing.end(0), TimeoutError), "it waits"
    reading.set()
    assert closing.end() is None
    assert problem_of(second) == verdict(0)


def test_launcher_0_does_not_wait_for_ever(make: Maker) -> None:
    first = make(0, 2)
    first.fail(cause(0))
    assert problem_of(first) == verdict(0)
    began = time.monotonic()
    first.close()
    assert 0.05 < time.monotonic() - began < 2


def test_nothing_said_means_nothing_to_wait_for(make: Maker) -> None:
    launchers = [make(k) for k in range(3)]
    began = time.monotonic()
    assert together(*(one.close for one in launchers)) == [None] * 3
    assert time.monotonic() - began < 0.15 + 0.2 * 3
