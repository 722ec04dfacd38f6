"""The way back to where a run stood, and what is refused on it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.engine.data.microbatch import Batching
from lockstep.engine.recovery.progress import Progress
from lockstep.errors import CheckpointError, RunDirectoryError
from lockstep.state.checkpoint.position import (
    Counters,
    Event,
    LoopEvent,
    MetricEvent,
    PhaseEvent,
    SavedPosition,
    SaveEvent,
)

BEFORE = Batching(batch_size=16, samples=64, order="shuffled", drop_last=False)


def loop(*, stretch: int = 0, complete: bool = False, batches: int = 2) -> LoopEvent:
    return LoopEvent(
        loader=0,
        stretch=stretch,
        round=0,
        batching=BEFORE,
        batches=batches,
        steps=4 + batches,
        last=batches - 1,
        before=3 + batches,
        complete=complete,
    )


def back_to(*events: Event, steps: int = 6, stretch: int = 0) -> Progress:
    progress = Progress()
    counters = Counters(steps, stretch, 1, ((0, 1),))
    progress.begin_replay(SavedPosition(points=6, counters=counters, events=events))
    return progress


def stopped(*, complete: bool = False, batches: int = 2, epoch: int | None = 1) -> Progress:
    """Return the way of a run that stood after some batches of a loop over its loader 0."""
    one = loop(stretch=epoch or 0, complete=complete, batches=batches)
    if epoch is None:
        return back_to(one)
    begin = Counters(4, epoch, 1)
    progress = back_to(PhaseEvent(epoch=epoch, begin=begin, events=[one]), stretch=epoch)
    progress.epoch_begins(progress.phase_begins(3)[0])
    return progress


def test_a_loop_that_makes_the_same_batches_goes_on() -> None:
    progress = stopped()
    start = progress.loop_begins(0, BEFORE)
    assert (start.batch, start.again, start.is_over) == (2, None, False)
    assert progress.has_arrived
    progress.arrive()
    assert progress.steps == 6


def test_a_loop_after_its_last_batch_computes_that_again() -> None:
    progress = stopped(batches=4)
    start = progress.loop_begins(0, BEFORE)
    assert (start.batch, start.again, start.first, start.is_over) == (4, 3, 3, False)
    assert progress.steps == 7
    assert not progress.has_arrived
    progress.repeated(start.loop)
    assert progress.has_arrived
    progress.arrive()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"batch_size": 8}, "batch_size: 16 recorded, 8 now"),
        ({"samples": 80}, "samples: 64 recorded, 80 now"),
        ({"samples": None, "order": "stream"}, "samples: 64 recorded, None now; order: 'shuffled'"),
        ({"order": "sequential"}, "order: 'shuffled' recorded, 'sequential' now"),
        ({"drop_last": True}, "drop_last: False recorded, True now"),
    ],
)
def test_the_rest_of_a_loop_with_other_batches_is_refused(change: dict, said: str) -> None:
    with pytest.raises(RunDirectoryError) as caught:
        stopped().loop_begins(0, replace(BEFORE, **change))
    assert "stopped after batch 2 of a loop of epoch 1 over loader 0" in caught.value.message
    assert said in caught.value.message
    assert "--fresh" in (caught.value.hint or "")


def test_outside_of_epochs_none_is_named() -> None:
    with pytest.raises(RunDirectoryError, match="after batch 2 of a loop over loader 0, which"):
        stopped(epoch=None).loop_begins(0, replace(BEFORE, batch_size=8))


def test_a_loop_that_is_over_may_have_made_other_batches() -> None:
    start = stopped(complete=True).loop_begins(0, replace(BEFORE, samples=80))
    assert (start.is_over, start.again) == (True, 1)


def test_a_later_loop_may_make_other_batches() -> None:
    progress = stopped()
    event = progress.loop_begins(0, BEFORE).loop
    assert progress.has_arrived
    progress.arrive()
    progress.loop_ends(event, early=False)
    progress.epoch_ends()
    progress.epoch_begins(2)
    start = progress.loop_begins(0, replace(BEFORE, samples=80, batch_size=8))
    assert start.batch == 0


def test_an_epoch_that_is_over_is_entered_again_where_no_other_follows() -> None:
    ended = PhaseEvent(epoch=1, ended=True, after=Counters(6, 2, 1))
    assert list(back_to(ended).phase_begins(3)) == [2]
    assert list(back_to(ended).phase_begins(2)) == [1]
    assert list(back_to(replace(ended, complete=True), SaveEvent()).phase_begins(2)) == [1]


def test_of_thousands_of_loops_a_few_are_computed_again() -> None:
    loops = [replace(loop(complete=True), round=number) for number in range(100)]
    progress = back_to(*loops)
    starts = []
    for _ in loops:
        start = progress.loop_begins(0, BEFORE)
        starts.append(start)
        if start.again is not None:
            progress.repeated(start.loop)
        progress.loop_ends(start.loop, early=True)
    assert all(start.is_over for start in starts)
    assert sum(start.again is not None for start in starts) == 32
    assert starts[0].again is not None
    assert starts[-1].again is not None
    assert progress.has_arrived
    progress.arrive()


@pytest.mark.parametrize(
    "act",
    [
        lambda progress: progress.phase_begins(1),
        lambda progress: progress.check_arrived(),
    ],
)
def test_another_script_than_before_is_refused(act) -> None:
    progress = back_to(MetricEvent(call="run.mean", done=True, value=1.0))
    with pytest.raises(CheckpointError, match="does not come to where its state was saved"):
        act(progress)


def test_saves_and_metrics_may_be_others_than_before() -> None:
    """A script may decide about them by what it does not have on the way back."""
    one, two = (MetricEvent(call="run.mean", done=True, value=value) for value in (1.0, 2.0))
    progress = back_to(one, SaveEvent(), loop(complete=True), SaveEvent(), two, SaveEvent())
    assert not progress.metric_begins("run.sum").done
    progress = back_to(one, SaveEvent(), loop(complete=True), SaveEvent(), two, SaveEvent())
    assert progress.passes_save(), "the metric before it is missing"
    assert progress.passes_save(), "one more than there were: nothing happens"
    start = progress.loop_begins(0, BEFORE)
    assert start.is_over
    progress.repeated(start.loop)
    progress.loop_ends(start.loop, early=True)
    assert progress.metric_begins("run.mean").value == 2.0
    assert not progress.has_arrived, "the save at which the run was may not be missing"
    assert progress.passes_save()
    assert progress.has_arrived


def test_what_is_in_a_loop_that_only_evaluates_is_computed_again() -> None:
    progress = back_to(SaveEvent())
    event = progress.loop_begins(3, BEFORE).loop
    metric = progress.metric_begins("run.mean")
    assert not metric.done
    progress.metric_ends(metric, 1.0, None)
    assert not progress.has_arrived
    progress.loop_ends(event, early=False)
    assert progress.evaluated_again == [3]
    assert progress.passes_save()
    assert progress.has_arrived
    progress.arrive()
