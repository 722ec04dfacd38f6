"""What a run leaves on disk when it ends: the newest snapshot, where that was long in coming."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lockstep.checkpoint.disk import Checkpoints, read
from lockstep.checkpoint.position import Counters, Position
from lockstep.checkpoint.shared_memory import Descriptors, tag_of
from lockstep.checkpoint.snapshot import Snapshots
from lockstep.training import final_checkpoint
from lockstep.training.final_checkpoint import FinalCheckpoint

TAG = tag_of(b"a run", 0)


@pytest.fixture
def snapshots() -> Iterator[Snapshots]:
    descriptors = Descriptors.create()
    yield Snapshots(descriptors, tag=TAG, part=0, parts=1)
    descriptors.close()


def text(step: int) -> str:
    position, _ = Position(points=step, counters=Counters(steps=step)).as_json()
    return json.dumps({"position": position, "state": {}})


def take(snapshots: Snapshots, step: int) -> None:
    snapshots.write(snapshots.number, text(step), {"weight": torch.full((3,), float(step))})


def checkpoints(directory: Path) -> Checkpoints:
    return Checkpoints(directory, {"name": "x"}, rank=0, size=1, store=None, keep=3)


def end(
    snapshots: Snapshots, directory: Path, *, every: float = 600.0, resumed: bool = False
) -> list[str]:
    """End a run; return what the user is told."""
    told: list[str] = []
    disk = checkpoints(directory)
    FinalCheckpoint(snapshots, disk, every=every, is_resumed=resumed, warn=told.append).save()
    return told


def saved(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("step-*"))


def test_a_long_run_leaves_its_newest_snapshot(snapshots, tmp_path, monkeypatch):
    take(snapshots, 7)
    assert end(snapshots, tmp_path) == []
    assert saved(tmp_path) == [], "it was short"
    monkeypatch.setattr(final_checkpoint, "_LONG", 0.0)
    assert end(snapshots, tmp_path, every=0.0) == []
    assert saved(tmp_path) == [], "no checkpoints are wanted"
    assert end(snapshots, tmp_path) == []
    assert saved(tmp_path) == ["step-00000007"]
    disk = checkpoints(tmp_path)
    found = disk.newest()
    assert found is not None
    assert read(found)["weight"].read().tolist() == [7.0] * 3
    assert found.text == text(7)


def test_a_run_that_went_on_is_long_however_little_was_left_of_it(snapshots, tmp_path):
    take(snapshots, 7)
    end(snapshots, tmp_path, resumed=True)
    assert saved(tmp_path) == ["step-00000007"]


@pytest.mark.parametrize("step", [7, 9])
def test_nothing_is_written_where_the_disk_has_something_as_new(snapshots, tmp_path, step):
    disk = checkpoints(tmp_path)
    disk.save(step, {"weight": torch.zeros(3)}, text(step), best=None)
    disk.wait()
    disk.close()
    take(snapshots, 7)
    assert end(snapshots, tmp_path, resumed=True) == []
    assert saved(tmp_path) == [f"step-{step:08d}"]


def test_no_snapshot(snapshots, tmp_path):
    assert end(snapshots, tmp_path, resumed=True) == []
    assert saved(tmp_path) == []


def test_a_disk_that_refuses_does_not_fail_a_run_that_is_done(snapshots, tmp_path):
    take(snapshots, 7)
    (tmp_path / "file").write_text("no directory")
    (told,) = end(snapshots, tmp_path / "file", resumed=True)
    assert told.startswith("lockstep: warning: the end of the run is not on disk: ")
    assert "computed again from an older state" in told
