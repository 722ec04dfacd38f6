"""Ranks that wait: when do they wait for each other in vain?"""

from __future__ import annotations

from lockstep.engine.training.collective_check import WaitingRank, mismatch
from lockstep.engine.training.heartbeat import Call
from lockstep.errors import MismatchError

BARRIER, MEAN, BUFFERS = ("run.barrier", ()), ("run.mean", ()), ("the exchange of buffers", ())


def backward(step: int, *models: int) -> tuple[str, tuple[int, ...]]:
    return "run.backward", (0, 0, 0, step, 0, *models)


def waiting(rank: int, first: int, *calls: tuple[str, tuple[int, ...]]) -> WaitingRank:
    recent = tuple(Call(first + index, kind, detail) for index, (kind, detail) in enumerate(calls))
    return WaitingRank(rank=rank, looks=3, place=f"train.py:{rank + 10} in main", recent=recent)


def test_what_is_told_comes_back() -> None:
    told = waiting(1, 5, BARRIER, backward(3, 0, 1))
    assert WaitingRank.load(told.dump()) == told


def test_the_same_call_is_no_mismatch() -> None:
    for call in (BARRIER, backward(4, 0)):
        assert mismatch(waiting(0, 5, call), waiting(1, 5, call)) is None


def test_two_calls_are_named_with_their_lines() -> None:
    error = mismatch(waiting(0, 5, BARRIER), waiting(1, 5, MEAN))
    assert isinstance(error, MismatchError)
    assert error.message == (
        "rank 0 is in run.barrier at train.py:10 in main, rank 1 is in run.mean at train.py:11 in main; "
        "expected the same call on all ranks"
    )


def test_a_rank_that_waits_twice_at_the_end_of_its_run_is_told_once() -> None:
    end = ("the end of the run", ())
    error = mismatch(waiting(0, 5, MEAN), waiting(1, 5, end, end))
    assert isinstance(error, MismatchError)
    assert "rank 1 is in the end of the run at train.py:11 in main; expected" in error.message


def test_a_backward_pass_is_told_with_its_batch() -> None:
    error = mismatch(waiting(0, 5, backward(3, 0)), waiting(1, 5, BARRIER))
    assert error is not None
    assert "rank 0 is in run.backward for batch 3 of loader 0 at train.py:10" in error.message


def test_other_models_in_one_batch() -> None:
    error = mismatch(waiting(0, 5, backward(3, 0)), waiting(1, 5, backward(3, 1)))
    assert error is not None
    assert (
        "rank 0 computes gradients of the run's models 0, rank 1 of 1 in the same" in error.message
    )
    assert error.hint is not None
    assert error.hint.startswith("let the loss depend on the same models")


def test_one_that_is_only_further_waits_for_a_third() -> None:
    """Rank 0 sends its buffers and goes on; rank 1 gets them by way of a rank that is late."""
    assert mismatch(waiting(0, 5, BUFFERS, backward(4, 0)), waiting(1, 5, BUFFERS)) is None


def test_one_that_is_further_by_another_way_is_a_mismatch() -> None:
    error = mismatch(waiting(0, 5, BUFFERS, BARRIER), waiting(1, 5, MEAN))
    assert error is not None
    assert (
        "rank 0 is in run.barrier at train.py:10 in main, after the exchange of b" in error.message
    )


def test_what_nobody_remembers_is_not_judged() -> None:
    assert mismatch(waiting(0, 50, BARRIER), waiting(1, 5, MEAN)) is None


def test_numbers_that_differ_by_themselves_are_no_mismatch() -> None:
    """Both wait in the same call: whatever was counted before, they wait for a third rank."""
    one, other = waiting(0, 5, MEAN, BARRIER), waiting(1, 4, BUFFERS, BARRIER)
    assert mismatch(one, other) is None


def test_calls_of_messages_are_compared_like_those_of_the_watchdog() -> None:
    calls = (
        ("run.barrier", "a.py:1 in f"),
        ("run.barrier", "a.py:2 in f"),
        ("run.mean", "b.py:3 in g"),
    )
    ranks = [WaitingRank.of_call(rank, *call) for rank, call in enumerate(calls)]
    assert mismatch(ranks[0], ranks[1]) is None
    error = mismatch(ranks[2], ranks[0])
    assert error is not None
    assert error.message.startswith(
        "rank 2 is in run.mean at b.py:3 in g, rank 0 is in run.barrier at a.py:1 in f; expected"
    )
