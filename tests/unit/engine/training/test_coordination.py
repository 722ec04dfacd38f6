"""Ranks agree on one step, wherever each of them is when somebody asks."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time

import pytest
import torch.distributed as dist

from lockstep.engine.recovery.coordination import Alone, OnStatusPage, ThroughStore
from lockstep.state.checkpoint.shared_memory import Descriptors, StatusPage


@pytest.fixture
def page():
    descriptors = Descriptors.create()
    yield StatusPage(descriptors.page)
    descriptors.close()


def test_a_single_rank_agrees_with_itself():
    alone = Alone()
    assert alone.at_point(1) is None
    alone.ask("save")
    alone.ask("stop")
    alone.ask("save")
    assert alone.at_point(2) == "stop"
    assert alone.at_point(3) is None


def points(ranks: int, steps: int, seed: int, ahead: int):
    """Yield (rank, steps done) in an order that training allows: none is more than `ahead` steps ahead.

    After every third step there is a second point, as at the end of an epoch.
    """
    dice = random.Random(seed)
    ways = [[n for n in range(1, steps + 1) for _ in range(1 + (n % 3 == 0))] for _ in range(ranks)]
    while any(ways):
        slowest = min(way[0] for way in ways if way)
        due = [rank for rank, way in enumerate(ways) if way and way[0] <= slowest + ahead]
        rank = dice.choice(due)
        yield rank, ways[rank].pop(0)


@pytest.mark.parametrize("ahead", [0, 1, 4])
@pytest.mark.parametrize("seed", range(20))
def test_ranks_on_a_status_page_act_after_the_same_step(page, seed, ahead):
    dice = random.Random(seed)
    ranks = [OnStatusPage(page, leads=rank == 0, ahead=ahead) for rank in range(3)]
    asks = sorted(dice.sample(range(60), 4))
    did: list[list[tuple[int, str]]] = [[], [], []]
    for number, (rank, step) in enumerate(points(3, 40, seed, ahead)):
        if number in asks:
            ranks[dice.randrange(3)].ask(dice.choice(["save", "stop"]))
        request = ranks[rank].at_point(step)
        if request is not None:
            did[rank].append((step, request))
    assert did[0] == did[1] == did[2]
    assert did[0], "somebody asked, and nothing came of it"
    assert all(a[0] < b[0] for a, b in itertools.pairwise(did[0])), "once for each step"


@contextlib.contextmanager
def looking(ranks):
    """Let each rank look at the store now and then, in a thread of its own."""
    ended = threading.Event()

    def look(rank):
        while not ended.wait(0.005):
            rank.poll()

    threads = [threading.Thread(target=look, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    yield
    ended.set()
    for thread in threads:
        thread.join(10)


@pytest.mark.parametrize("wanted", ["snapshot", "save"])
def test_ranks_that_have_only_the_store(wanted):
    store = dist.HashStore()
    ranks = [ThroughStore(store, rank, 3) for rank in range(3)]
    meet = threading.Barrier(3)
    did: list[list[tuple[int, str]]] = [[], [], []]

    def train(rank: int) -> None:
        for step in range(1, 1000):
            meet.wait(10)  # the exchange
            if step == 5 and rank == 1:
                ranks[rank].ask(wanted)
            request = ranks[rank].at_point(step)
            if request is not None:
                did[rank].append((step, request))
                if request == "stop":
                    return
                if rank == 2:
                    ranks[rank].ask("stop")
            time.sleep(0.005)

    threads = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in range(3)]
    with looking(ranks):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert did[0] == did[1] == did[2]
    assert [request for _, request in did[0]] == [wanted, "stop"]


def test_a_request_to_stop_that_comes_while_others_agree_to_save_is_not_lost(page):
    first, second = OnStatusPage(page, leads=True), OnStatusPage(page, leads=False)
    first.ask("save")
    assert first.at_point(1) is None
    second.ask("stop")  # after the first rank has named step 2
    did = [(step, one.at_point(step)) for step in range(2, 6) for one in (second, first)]
    assert [request for step, request in did if step == 2] == ["save", "save"]
    assert [step for step, request in did if request == "stop"] == [4, 4]


def test_a_request_to_stop_that_is_too_late_for_a_turn_is_for_the_next_one():
    store = dist.HashStore()
    ranks = [ThroughStore(store, rank, 2) for rank in range(2)]
    ranks[0].ask("save")
    for rank in ranks:
        rank.poll()
    for rank in ranks:
        rank.ask("stop")
    did = []
    for step in range(1, 10):
        for rank in ranks:
            rank.poll()
        did += [request for rank in ranks if (request := rank.at_point(step)) is not None]
    assert did == ["save", "save", "stop", "stop"]


def test_what_an_earlier_run_has_agreed_on_is_past(page):
    first = OnStatusPage(page, leads=True)
    first.ask("stop")
    assert first.at_point(1) is None
    page.begin_run()
    second = OnStatusPage(page, leads=True)
    assert [second.at_point(step) for step in (1, 2, 3)] == [None, None, None]


class Racing(ThroughStore):
    """Its main thread ends a turn at the very moment at which its other thread reads which one it is."""

    race = False
    number = 0

    @property
    def _turn(self) -> int:
        seen = self.number
        if self.race:
            self.race = False
            assert self.at_point(7) == "save"
        return seen

    @_turn.setter
    def _turn(self, number: int) -> None:
        self.number = number


def test_a_turn_that_ends_while_a_thread_looks_is_not_taken_again():
    """The rank would save, or stop, a second time, and alone."""
    store = dist.HashStore()
    for key in ("0/asked", "0/save", "0/ready/0", "0/ready/1"):
        store.set(key, "1")
    store.set("0/at", "7")
    rank = Racing(store, 1, 2)
    rank.poll()
    rank.race = True
    rank.poll()
    if rank.race:  # it has not looked at the turn: the main thread ends it now
        assert rank._turn == 0
    assert rank._ready is None
    assert rank.at_point(8) is None
