"""Where a rank stands: numbers that its launcher reads."""

from __future__ import annotations

import functools

import pytest

from lockstep.engine.data.microbatch import LoopKey
from lockstep.engine.training.heartbeat import Heartbeat
from lockstep.state.checkpoint.shared_memory import AFTER_RUN, COLLECTIVES, ProgressSlot


@pytest.fixture
def slot() -> ProgressSlot:
    return ProgressSlot()


def test_everything_that_happens_is_a_sign_of_life(slot: ProgressSlot) -> None:
    heartbeat = Heartbeat(slot)
    beats = [slot.beat]
    for event in (
        heartbeat.moves,
        heartbeat.others_move,
        lambda: heartbeat.loop_begins(LoopKey(0, 0, 0)),
        lambda: heartbeat.loop_ends(LoopKey(0, 0, 0), 1, early=False),
        lambda: heartbeat.enter("run.barrier"),
        heartbeat.leave,
    ):
        event()
        beats.append(slot.beat)
    assert beats == sorted(set(beats))


def test_others_that_move_are_no_move_of_this_rank(slot: ProgressSlot) -> None:
    heartbeat = Heartbeat(slot)
    before = heartbeat.beat
    heartbeat.others_move()
    assert heartbeat.beat == before
    assert slot.beat == before + 1


def test_a_collective_call_is_entered_and_left(slot: ProgressSlot) -> None:
    heartbeat = Heartbeat(slot)
    with heartbeat.collective("run.barrier"):
        assert (slot.entered, COLLECTIVES[slot.waiting]) == (1, "run.barrier")
        assert heartbeat.waits
        assert heartbeat.recent[-1] == (1, "run.barrier", ())
    assert (slot.entered, slot.waiting, heartbeat.waits) == (1, 0, False)


def test_a_collective_call_that_fails_is_left(slot: ProgressSlot) -> None:
    heartbeat = Heartbeat(slot)
    with pytest.raises(ValueError, match="x"), heartbeat.collective("run.mean"):
        raise ValueError("x")
    assert slot.waiting == 0


def test_a_call_inside_of_another_returns_to_it(slot: ProgressSlot) -> None:
    """As of layers with collectives in a backward pass, in which ranks continue to wait."""
    heartbeat = Heartbeat(slot)
    inner = functools.partial(heartbeat.collective, "the statistics of BatchNorm")
    heartbeat.enter("run.backward", (0, 1))
    for _ in range(2):
        with inner():
            assert heartbeat.recent[-1].kind == "the statistics of BatchNorm"
        assert heartbeat.waits
        assert heartbeat.recent[-1][1:] == ("run.backward", (0, 1))
        assert COLLECTIVES[slot.waiting] == "run.backward"
    assert slot.entered == heartbeat.recent[-1].number == 5
    heartbeat.leave()
    assert not heartbeat.waits
    with inner():
        pass
    assert (slot.waiting, heartbeat.waits) == (0, False)


def test_an_inner_call_that_fails_ends_the_outer_call(slot: ProgressSlot) -> None:
    heartbeat = Heartbeat(slot)
    heartbeat.enter("run.backward")
    with pytest.raises(ValueError, match="x"), heartbeat.collective("run.mean"):
        raise ValueError("x")
    assert not heartbeat.waits


def test_a_call_without_a_number_is_shown_as_some_collective_call(slot: ProgressSlot) -> None:
    Heartbeat(slot).enter("a call of tomorrow")
    assert COLLECTIVES[slot.waiting] == "a collective call"


def test_steps_are_shown(slot: ProgressSlot) -> None:
    Heartbeat(slot).step_ends(12, None)  # type: ignore[arg-type]
    assert slot.step == 12


def test_a_second_run_goes_on_counting(slot: ProgressSlot) -> None:
    first = Heartbeat.begin(slot, {})
    first.enter("run.barrier")
    first.leave()
    first.closes()
    assert slot.waiting == AFTER_RUN
    beat = slot.beat
    second = Heartbeat.begin(slot, {})
    assert slot.waiting == 0
    assert slot.beat > beat
    second.enter("run.barrier")
    assert slot.entered == 2


def test_without_a_launcher() -> None:
    heartbeat = Heartbeat.begin(None, {})
    heartbeat.enter("run.barrier")
    assert heartbeat.waits
