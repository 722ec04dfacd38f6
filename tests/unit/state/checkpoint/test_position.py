"""A position comes back from JSON as it was."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from lockstep.engine.data.microbatch import Batching
from lockstep.errors import CheckpointError
from lockstep.state.checkpoint.position import (
    Counters,
    LoopEvent,
    MetricEvent,
    PhaseEvent,
    SavedPosition,
    SaveEvent,
)

BATCHING = Batching(batch_size=8, samples=None, order="stream", drop_last=True)
BEGIN = Counters(4, 3, 2, ((0, 1), (1, 2)))
LOOP = LoopEvent(
    loader=1,
    stretch=3,
    round=0,
    batching=BATCHING,
    batches=3,
    steps=7,
    last=2,
    before=6,
    losses=[0.1],
)
METRIC = MetricEvent(call="run.mean", done=True, value={"loss": 0.1, "top1": 3}, key=7, after=BEGIN)
SUMS = MetricEvent(call="run.sum", value=[{"": [1, 0]}, {}], events=[LOOP])
PHASE = PhaseEvent(epoch=2, begin=BEGIN, events=[METRIC, SaveEvent(), SUMS])
POSITION = SavedPosition(
    points=9, counters=BEGIN, events=[PhaseEvent(epoch=1, complete=True), PHASE]
)


def test_there_and_back() -> None:
    told, tensors = POSITION.as_json()
    assert not tensors
    assert SavedPosition.parse(json.loads(json.dumps(told))) == POSITION


def test_values_may_have_tensors() -> None:
    rows = torch.arange(6).view(3, 2)
    metric = MetricEvent(call="run.gather", done=True, value={"a": rows, "b": [rows[0], 1]})
    told, tensors = SavedPosition(events=[metric]).as_json()
    (back,) = SavedPosition.parse(json.loads(json.dumps(told)), tensors).events
    assert isinstance(back, MetricEvent)
    assert torch.equal(back.value["a"], rows)
    assert torch.equal(back.value["b"][0], rows[0])
    assert back.value["b"][1] == 1


@pytest.mark.parametrize(
    "told",
    [{}, {"points": 1, "steps": 3}, {"points": 1, "counters": {}, "events": []}, {"events": [1]}],
)
def test_what_is_no_position_is_refused(told: dict) -> None:
    with pytest.raises(CheckpointError, match="does not say where the run was") as caught:
        SavedPosition.parse(told)
    assert "--fresh" in (caught.value.hint or "")


def test_a_batch_of_no_samples_is_refused() -> None:
    told, _ = SavedPosition(events=[LOOP]).as_json()
    told["events"][0]["batching"]["batch_size"] = 0
    with pytest.raises(CheckpointError, match="does not say where the run was"):
        SavedPosition.parse(told)


def test_batches_of_a_batch_sampler_are_counted() -> None:
    """A state of an earlier version has no count."""
    sampled = Batching(batch_size=None, samples=None, order="Buckets", drop_last=False, count=7)
    for batching, expected in ((sampled, 7), (BATCHING, None)):
        loop = LoopEvent(loader=0, stretch=0, round=0, batching=batching)
        told, _ = SavedPosition(events=[loop]).as_json()
        if expected is None:
            del told["events"][0]["batching"]["count"]
        (parsed,) = SavedPosition.parse(json.loads(json.dumps(told))).events
        assert parsed == loop
        assert parsed.batching.batches == expected
    told["events"][0]["batching"] |= {"batch_size": None}
    with pytest.raises(CheckpointError):
        SavedPosition.parse(told)
    other = replace(sampled, count=8)
    assert sampled.differences(other) == ["count: 7 recorded, 8 now"]
