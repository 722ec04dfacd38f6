"""Signs of life between ranks, by a clock that goes when it is told to."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from lockstep.errors import PeerError
from lockstep.training import watchdog
from lockstep.training.watchdog import EVERY, SILENCE, Liveness


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
            one.look()


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
