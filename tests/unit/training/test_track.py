"""The way back to where a run stood, and what is refused on it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockstep.checkpoint.position import LoopPosition, Position
from lockstep.data.microbatch import Batching
from lockstep.errors import RunDirectoryError
from lockstep.training.track import Track

BEFORE = Batching(batch_size=16, samples=64, order="shuffled", drop_last=False)


def stopped(
    *, complete: bool = False, batching: Batching | None = BEFORE, epoch: int | None = 1
) -> Track:
    """Return the way of a run that stood after batch 2 of a loop over its loader 0."""
    stretch = epoch or 0
    loop = LoopPosition(0, stretch, 0, 2, 6, complete=complete, batching=batching)
    track = Track()
    track.set_out(
        Position(
            steps=6, points=6, epoch=epoch, stretch=stretch, loaders=1, before=4, loops=(loop,)
        )
    )
    if epoch is not None:
        track.epoch_begins(track.phase_begins(3)[0])
    return track


def test_a_loop_that_makes_the_same_batches_goes_on() -> None:
    track = stopped()
    start = track.loop_begins(0, BEFORE)
    assert (start.batch, start.is_over) == (2, False)
    assert track.arrives() is not None
    assert track.steps == 6


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
    assert stopped(complete=True).loop_begins(0, replace(BEFORE, samples=80)).is_over


def test_a_later_loop_may_make_other_batches() -> None:
    track = stopped()
    track.loop_begins(0, BEFORE)
    assert track.arrives() is not None
    track.epoch_ends()
    track.epoch_begins(2)
    assert track.loop_begins(0, replace(BEFORE, samples=80, batch_size=8)).batch == 0


def test_a_state_that_does_not_say_is_believed() -> None:
    assert stopped(batching=None).loop_begins(0, BEFORE).batch == 2
