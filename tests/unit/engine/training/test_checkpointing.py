"""When ranks that gather the state together do so to take memory for snapshots."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.engine.recovery.checkpointing import StateSaver


class Counted:
    """A run's state whose gathering is counted."""

    is_gathered = True
    initial = ()

    def __init__(self) -> None:
        self.gathered: list[int] = []
        self.now = 0

    def capture(self) -> dict[str, Any]:
        self.gathered.append(self.now)
        return {}

    def forgotten_scheduler(self) -> None:
        return None

    def forgotten_attributes(self) -> None:
        return None


def gathered_at(
    points: int, begins: int | None, *, leads: bool, launched: bool = True
) -> list[int]:
    """Return at which points state is gathered, where the first snapshot has been taken at `begins`."""
    state, keeps = Counted(), SimpleNamespace(prepare=lambda _: None)
    position = SimpleNamespace(as_json=lambda: ({}, {}))
    schedule = SimpleNamespace(
        due=lambda _: 0, needs_memory=leads, taken=0, prepare=lambda *_: None
    )
    progress = SimpleNamespace(position=lambda _: position, open_metrics=[])
    loop = SimpleNamespace(steps=0, points=0, progress=progress)
    coordination = SimpleNamespace(at_point=lambda _: None)
    context = SimpleNamespace(
        group=None,
        settings=SimpleNamespace(exact=True, checkpoint_every=0.0, anchors=0),
        world=SimpleNamespace(is_main=leads),
        record=SimpleNamespace(warn=lambda _: None, flush=list),
    )
    made: Any = (context, state, loop, None, coordination, schedule if launched else None, keeps)
    keeper = StateSaver(*made, aligned=True, apart=False)
    for point in range(1, points + 1):
        state.now = loop.steps = point
        schedule.taken = begins is not None and point > begins
        keeper.at_point()
    return state.gathered


@pytest.mark.parametrize("leads", [True, False])
def test_ranks_gather_at_the_same_points_and_stop(leads: bool) -> None:
    """Whether a rank leads is its own affair, and must make no difference to when all gather."""
    assert gathered_at(40, 5, leads=leads) == [1, 2, 4]
    assert gathered_at(100, None, leads=leads) == [1, 2, 4, 8, 16, 32, 64]
    assert gathered_at(40_000, None, leads=leads)[-2:] == [8192, 16384]


def test_ranks_gather_nothing_that_nobody_has_asked_for() -> None:
    """Without a launcher there are no snapshots; memory for checkpoints is no reason to gather a model."""
    assert gathered_at(100, None, leads=True, launched=False) == []
