"""Faults that a rank injects into itself: which are its own, and when they happen."""

from __future__ import annotations

import signal

import pytest

from lockstep.engine.training.faults import LEFT_OUT, VARIABLE, Faults
from lockstep.errors import UsageError
from lockstep.world.model import World


def of(text: str, rank: int, generation: int = 0) -> Faults | None:
    world = World(rank=rank, size=2, address="x", port=1, generation=generation)
    return Faults.of({VARIABLE: text}, world)


def test_kills_are_the_last_ranks_one_for_each_generation():
    text = "kill@30,kill@60"
    assert of(text, rank=0) is of(text, rank=1, generation=2) is None
    assert [of(text, rank=1, generation=number).kill for number in range(2)] == [30, 60]


def test_a_signal_is_sent_once_to_the_main_rank(monkeypatch):
    sent = []
    monkeypatch.setattr(
        "lockstep.engine.training.faults.os.kill", lambda _, number: sent.append(number)
    )
    faults = of("term@3", rank=0)
    for step in range(1, 6):
        faults.step_ends(step, None)
        faults.at_point()
    assert sent == [signal.SIGTERM]
    assert of("term@3", rank=1) is None


def test_a_signal_after_the_first_of_two_steps_of_a_batch_comes_when_the_batch_is_done(monkeypatch):
    sent = []
    monkeypatch.setattr("lockstep.engine.training.faults.os.kill", lambda *_: sent.append(step))
    faults = of("term@3,term@8", rank=0)
    for step in (2, 4, 4, 6, 8, 10):  # a point after each batch, and one after an epoch
        faults.step_ends(step, None)
        faults.at_point()
    assert sent == [4, 8]


def test_a_run_that_goes_on_is_not_sent_the_signals_of_steps_that_are_done(monkeypatch):
    sent = []
    monkeypatch.setattr("lockstep.engine.training.faults.os.kill", lambda *_: sent.append(step))
    faults = of("term@3,term@9", rank=0)
    faults.resume(7)
    for step in (8, 10):
        faults.step_ends(step, None)
        faults.at_point()
    assert sent == [10]


def flipping(text: str, size: int, left_out: str = "") -> list[int]:
    """Return the step from which on each rank flips a bit; 0 for none."""
    worlds = [World(rank=rank, size=size, address="x", port=1) for rank in range(size)]
    found = [Faults.of({VARIABLE: text, LEFT_OUT: left_out}, world) for world in worlds]
    return [0 if one is None else one.flip for one in found]


def test_bits_flip_on_ranks_of_the_first_start_also_when_others_are_left_out():
    assert flipping("flip@5", 3) == [0, 0, 5]
    assert flipping("flip:1@5", 3) == [0, 5, 0]
    assert flipping("flip:1@5,flip:3@7,flip:1@4", 4) == [0, 4, 0, 7]
    assert flipping("flip:1@5,flip:3@7", 3, left_out="1") == [0, 0, 7]
    assert flipping("flip@5", 2, left_out="2") == [0, 0]
    assert flipping("flip:7@5", 3) == [0, 0, 0]


@pytest.mark.parametrize(
    "text",
    [
        "flip:x@3",
        "kill:1@3",
        "flip:@3",
        "kill",
        "kill@",
        "kill@0",
        "kill@x",
        "hang@3",
        "kill@3 term@4",
    ],
)
def test_what_makes_no_sense_is_refused(text):
    with pytest.raises(UsageError, match="expected words such as kill@30"):
        of(text, rank=0)
