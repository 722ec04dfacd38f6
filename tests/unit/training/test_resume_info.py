"""What a run directory says of the run in it, to a launch that has made it and to another one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch.distributed as dist

from lockstep.training.resume_info import ResumeInfo, launch_of, recall
from lockstep.world.meet import Meeting
from lockstep.world.model import World


def meeting(generation: int = 0, environment: str = "lockstep") -> Meeting:
    world = World(generation=generation, environment=environment)
    return Meeting(world=world, store=dist.HashStore(), number=0, ours=True)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    recorded = {
        "identity": {"replicas": 4, "threads": 2},
        "launch": "one",
        "generations": [{}, {}],
        "status": "finished",
    }
    (tmp_path / "run.json").write_text(json.dumps(recorded))
    return tmp_path


def test_the_launch_that_has_made_it_goes_on_with_it_fresh_or_not(directory):
    mine = ResumeInfo(generations=2, replicas=4, threads=2, is_ours=True)
    assert recall(meeting(1), directory, "one", fresh=False) == mine
    assert recall(meeting(1), directory, "one", fresh=True) == mine


def test_a_restart_before_anything_was_recorded_does_not_go_on_with_an_older_run(directory):
    """Killed before it opened its run: what lies there is of another launch."""
    assert recall(meeting(1), directory, "two", fresh=True) == ResumeInfo()
    assert not recall(meeting(1), directory, "two", fresh=False).is_ours


def test_an_empty_directory_and_none(tmp_path):
    assert recall(meeting(), tmp_path, "one", fresh=False).is_new
    assert recall(meeting(), None, "one", fresh=False).is_new


def test_launchers_that_give_no_name(directory):
    world = World(environment="torchrun")
    assert launch_of(world, {"LOCKSTEP_LAUNCH": "none"}) is None
    assert launch_of(World(environment="lockstep"), {"LOCKSTEP_LAUNCH": "x"}) == "x"
    assert not recall(meeting(1, "torchrun"), directory, None, fresh=False).is_ours
    recorded = json.loads((directory / "run.json").read_text())
    (directory / "run.json").write_text(json.dumps({**recorded, "launch": None}))
    assert recall(meeting(1, "torchrun"), directory, None, fresh=False).is_ours
    assert not recall(meeting(0, "torchrun"), directory, None, fresh=False).is_ours
