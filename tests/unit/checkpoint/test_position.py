"""A position comes back from JSON as it was."""

from __future__ import annotations

import json

from lockstep.checkpoint.position import LoopPosition, Position
from lockstep.data.microbatch import Batching

BATCHING = Batching(batch_size=8, samples=None, order="stream", drop_last=True)
POSITION = Position(
    steps=7,
    points=9,
    phase=1,
    epoch=2,
    stretch=3,
    loaders=2,
    before=4,
    rounds=((0, 1), (1, 2)),
    phases=((1, 2, 3),),
    loops=(LoopPosition(0, 3, 0, 3, 7, complete=True), LoopPosition(1, 3, 1, batching=BATCHING)),
)


def test_there_and_back() -> None:
    assert Position.parse(json.loads(json.dumps(POSITION.as_json()))) == POSITION


def test_loops_of_format_1_do_not_say_how_they_make_batches() -> None:
    told = POSITION.as_json()
    for loop in told["loops"]:
        del loop["batching"]
    assert [loop.batching for loop in Position.parse(told).loops] == [None, None]
