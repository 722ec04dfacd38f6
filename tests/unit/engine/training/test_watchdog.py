"""The watch over other ranks, without other processes: what a rank that stands still finds in the store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.engine.data.microbatch import LoopKey
from lockstep.engine.training import watchdog
from lockstep.engine.training.heartbeat import Heartbeat
from lockstep.engine.training.watchdog import EVERY, SILENCE, Liveness, Watchdog
from lockstep.errors import LockstepError, PeerError
from lockstep.state.checkpoint.shared_memory import ProgressSlot
from lockstep.state.record.stacks import Frame
from lockstep.world.model import World
from lockstep.world.rendezvous.rank_rendezvous import RankRendezvous
from tests.unit.threads import Party


class Rank:
    """One rank of two, with its watch."""

    def __init__(self, rank: int, store: dist.Store) -> None:
        world = World(
            rank=rank,
            size=2,
            local_rank=rank,
            local_size=2,
            address="127.0.0.1",
            port=1,
            environment="lockstep",
            reason="a test",
        )
        self.slot = ProgressSlot()
        self.heartbeat = Heartbeat(self.slot)
        self.told: list[LockstepError] = []
        self.place: Frame | None = None
        rendezvous = RankRendezvous(world=world, store=store, number=0, ours=True)
        self.watch = Watchdog(rendezvous, self.heartbeat, self.tell)

    def tell(self, error: LockstepError, place: Frame | None) -> None:
        self.place = place
        self.told.append(error)


@pytest.fixture
def ranks(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[list[Rank]]:
    # `capfd` comes first: it must not be taken down while their threads still print.
    monkeypatch.setattr(watchdog, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watchdog.os, "_exit", lambda _code: None)
    store = dist.HashStore()
    both = [Rank(rank, store) for rank in range(2)]
    yield both
    for rank in both:
        rank.watch.close()


def until(condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return bool(condition())


def test_ranks_that_wait_in_one_call_wait(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.heartbeat.enter("run.barrier")
    time.sleep(0.3)
    assert [rank.told for rank in ranks] == [[], []]


def test_ranks_that_wait_in_two_calls_are_told(ranks: list[Rank], capfd) -> None:
    ranks[0].heartbeat.enter("run.barrier")
    ranks[1].heartbeat.enter("run.mean")
    assert until(lambda: ranks[0].told or ranks[1].told)
    error = (ranks[0].told or ranks[1].told)[0]
    assert "run.barrier" in error.message
    assert "run.mean" in error.message
    assert until(lambda: ranks[0].told and ranks[1].told), "the other one hears of it"
    said = capfd.readouterr().err
    assert "lockstep: error: " in said
    assert "test_watchdog.py:" in said, "where this test stands"
    assert "site-packages" not in said, "and nothing of what has called it or is called there"
    place = ranks[0].place
    assert place is not None
    assert place.file == __file__


def test_a_look_that_fails_is_told_once_and_the_others_go_on(ranks: list[Rank], capfd) -> None:
    looks = []
    ranks[0].watch.also = [lambda: looks.append(1 / 0), lambda: looks.append("next")]
    ranks[0].heartbeat.enter("run.barrier")
    ranks[1].heartbeat.enter("run.mean")
    assert until(lambda: looks.count("next") > 3)
    assert until(lambda: ranks[0].told or ranks[1].told), "ranks are compared still"
    warning = "lockstep: warning: the watchdog of rank 0: ZeroDivisionError: division by zero"
    assert capfd.readouterr().err.count(warning) == 1


def test_a_rank_that_went_on_is_not_compared(ranks: list[Rank]) -> None:
    ranks[0].heartbeat.enter("run.barrier")
    time.sleep(0.1)
    ranks[0].heartbeat.leave()
    ranks[0].heartbeat.moves()
    ranks[1].heartbeat.enter("run.mean")
    time.sleep(0.3)
    assert [rank.told for rank in ranks] == [[], []]


def test_a_rank_that_waits_gives_a_sign_while_another_moves(ranks: list[Rank]) -> None:
    ranks[0].heartbeat.enter("run.barrier")
    beat = ranks[0].slot.beat

    def moved() -> bool:
        ranks[1].heartbeat.moves()
        return ranks[0].slot.beat > beat + 3

    assert until(moved)
    time.sleep(0.1)
    still = ranks[0].slot.beat
    time.sleep(0.2)
    assert ranks[0].slot.beat == still, "nobody moves"


def test_a_store_that_is_gone_ends_who_waits(ranks: list[Rank], capfd) -> None:
    class Gone:
        def __getattr__(self, name: str) -> object:
            raise dist.DistNetworkError("no connection")

    ranks[0].watch._thread_store = Gone()  # type: ignore[assignment]
    assert until(lambda: ranks[0].told)
    assert "the store is gone, and with it the rank that hosts it" in ranks[0].told[0].message
    capfd.readouterr()


@pytest.mark.parametrize(("row", "told"), [(range(2), True), (range(1), False)])
def test_ranks_of_one_model_wait_for_each_other_alone(
    ranks: list[Rank], row: range, told: bool, capfd
) -> None:
    """Other rows may be through with a loop that only evaluates."""
    for rank in ranks:
        rank.watch.loop_begins(LoopKey(0, 0, 0))
    ranks[1].watch.loop_ends(LoopKey(0, 0, 0), 2, early=True)
    with ranks[0].watch.passing(row):
        if told:
            assert until(lambda: ranks[0].told)
            assert "rank 1 left this loop in batch 2" in ranks[0].told[0].message
        else:
            time.sleep(0.3)
            assert not ranks[0].told
    assert ("lockstep: error: " in capfd.readouterr().err) == told


@pytest.mark.parametrize(
    ("rank", "ranks", "compared"),
    [
        (1, range(4), [2, 3, 0]),
        (5, range(4, 6), [4]),
        (0, range(1), []),
        (98, range(100), [99, 0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_each_rank_looks_at_the_next_ones(rank: int, ranks: range, compared: list[int]) -> None:
    assert watchdog._after(rank, ranks) == compared


def test_a_backward_pass_that_failed_is_left_with_its_batch(ranks: list[Rank]) -> None:
    first, heartbeat = ranks[0].watch, ranks[0].heartbeat
    microbatch: Any = SimpleNamespace(last=True, loop=(0, 0, 0), step=0, turn=0)
    first.loop_begins(LoopKey(0, 0, 0))
    first.microbatch_begins(microbatch)
    first.backward_begins(microbatch, [0])
    assert heartbeat.waits
    first.microbatch_begins(microbatch)
    assert not heartbeat.waits
    first.backward_begins(microbatch, [0])
    first.loop_ends(LoopKey(0, 0, 0), 1, early=True)
    assert not heartbeat.waits


def test_a_rank_that_ended_after_the_same_backward_pass_is_waited_for(ranks: list[Rank]) -> None:
    """Its last gradients may still be on a slow link."""
    batch = SimpleNamespace(last=True, loop=(0, 0, 0), step=1, turn=0)
    for rank in ranks:
        rank.watch.loop_begins(LoopKey(0, 0, 0))
        rank.watch.backward_begins(batch, [0])  # type: ignore[arg-type]
    first, second = ranks
    first.watch.backward_ends()
    first.watch.loop_ends(LoopKey(0, 0, 0), 1, early=False)
    first.watch.run_ends()
    time.sleep(0.3)
    assert not second.told
    second.watch.backward_ends()
    second.watch.backward_begins(batch, [0])  # type: ignore[arg-type] - one more than the other
    assert until(lambda: second.told)
    assert "rank 0 ended after 1 loops" in str(second.told[0])


def test_a_store_that_does_not_answer_holds_up_no_end(
    ranks: list[Rank], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, released = threading.Event(), threading.Event()

    def look(_watch: Watchdog) -> None:
        asked.set()
        released.wait(60)

    monkeypatch.setattr(watchdog, "_CLOSE_SECONDS", 0.1)
    monkeypatch.setattr(Watchdog, "_look", look)
    assert asked.wait(10)
    try:
        assert Party(ranks[0].watch.close).end() is None
    finally:
        released.set()


def test_its_thread_looks_at_what_else_is_in_the_store(ranks: list[Rank]) -> None:
    looked = threading.Event()
    ranks[0].watch.also.append(looked.set)
    assert looked.wait(10)


# --- signs of life, by a clock that goes when it is told to ------------------------------------------


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


def go(clock: Clock, seconds: float, *pulses: Liveness) -> None:
    end = clock.now + seconds
    while clock.now < end:
        clock.now += 1.0
        for one in pulses:
            one.beat()


def test_ranks_that_live(clock: Clock) -> None:
    store = dist.HashStore()
    pulses = [Liveness(store, rank, 3) for rank in range(3)]
    go(clock, 10 * SILENCE, *pulses)
    assert [one.lost() for one in pulses] == [None] * 3


def test_a_rank_that_falls_silent_is_named_by_the_one_before_it(clock: Clock) -> None:
    store = dist.HashStore()
    first, second, third = (Liveness(store, rank, 3) for rank in range(3))
    go(clock, 60, first, second, third)
    go(clock, SILENCE + 2 * EVERY, first, third)
    assert third.lost() is None
    error = first.lost()
    assert isinstance(error, PeerError)
    assert "rank 1 gives no sign of life for" in error.message


def test_a_rank_that_comes_back_is_forgiven(clock: Clock) -> None:
    store = dist.HashStore()
    first, second = (Liveness(store, rank, 2) for rank in range(2))
    go(clock, 20, first, second)
    go(clock, SILENCE / 2, first)
    go(clock, 20, first, second)
    go(clock, SILENCE / 2, first)
    assert first.lost() is None


def test_a_rank_that_was_stopped_itself_blames_nobody(clock: Clock) -> None:
    store = dist.HashStore()
    first, second = (Liveness(store, rank, 2) for rank in range(2))
    go(clock, 20, first, second)
    clock.now += 100 * SILENCE
    go(clock, 20, first)
    assert first.lost() is None
