"""Checkpoints of one rank, or of several threads that stand for ranks: whole, or not there (A15)."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.errors import CheckpointError, RunDirectoryError
from lockstep.state.checkpoint import catalog, dcp, writer
from lockstep.state.checkpoint.dcp import stored
from lockstep.state.checkpoint.export import choose
from lockstep.state.checkpoint.writer import DraftDirectory
from tests.unit.state.checkpoint.conftest import IDENTITY


def state(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {f"models.0.{k}.weight": torch.randn(50, k, generator=generator) for k in (1, 2, 3)}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def save(checkpoints: Any, *steps: int, best: float | None = None) -> None:
    for step in steps:
        checkpoints.save(step, state(step), json.dumps({"step": step}), best=best)
    checkpoints.wait()


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if not path.name.startswith(".draft"))


def whole(checkpoints: Any, step: int) -> bool:
    """Whether the newest checkpoint is that of `step`, and all of it."""
    found = checkpoints.catalog.newest()
    if found is None or found.manifest.step != step:
        return False
    tensors = {name: one.read() for name, one in stored(found.path, found.manifest).items()}
    return same(tensors, state(step)) and json.loads(found.manifest.text) == {"step": step}


def test_what_is_saved_comes_back(make, directory, warned) -> None:
    checkpoints = make()
    assert checkpoints.catalog.newest() is None
    save(checkpoints, 3, 12)
    assert names(directory) == ["step-00000003", "step-00000012"]
    assert names(directory / "step-00000012") == [".metadata", "__0_0.distcp", "manifest.json"]
    assert whole(make(), 12)
    assert not warned


def test_nobody_else_may_read_it(make, directory) -> None:
    old = os.umask(0)
    try:
        save(make(), 1)
    finally:
        os.umask(old)
    for path in [directory, *directory.rglob("*")]:
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_training_goes_on_with_tensors_of_its_own(make) -> None:
    checkpoints, tensors = make(), state(5)
    checkpoints.prepare(tensors)
    checkpoints.save(5, tensors, '{"step": 5}', best=None)
    for tensor in tensors.values():
        tensor.zero_()
    checkpoints.wait()
    assert whole(checkpoints, 5)


def test_the_latest_and_the_best_stay(make, directory) -> None:
    checkpoints = make(keep=2)
    for step, best in [(1, 0.1), (2, 0.9), (3, None), (4, 0.8), (5, float("nan")), (6, 0.2)]:
        save(checkpoints, step, best=best)
    assert names(directory) == ["step-00000002", "step-00000005", "step-00000006"]
    assert catalog.read_manifest(directory / "step-00000005").best is None
    save(checkpoints, 7, best=0.9)  # as good, and later
    assert names(directory) == ["step-00000006", "step-00000007"]


def test_the_latest_that_an_audit_has_confirmed_stays(make, directory) -> None:
    checkpoints = make(keep=1)
    checkpoints.catalog.confirmed = lambda: 4
    save(checkpoints, 2, 3, 6, 8)
    assert names(directory) == ["step-00000003", "step-00000008"]
    checkpoints.catalog.confirmed = lambda: 8
    save(checkpoints, 9)
    assert names(directory) == ["step-00000008", "step-00000009"]


def test_what_is_not_confirmed_is_renamed_and_not_resumed(make, directory) -> None:
    checkpoints = make(keep=9)
    save(checkpoints, 3, 6, 9)
    for count, aside in ((2, ["unconfirmed-step-00000006", "unconfirmed-step-00000009"]), (0, [])):
        moved = checkpoints.catalog.set_aside(3)
        assert sorted(path.name for path in moved) == aside
        assert len(moved) == count
        assert whole(checkpoints, 3)
    again = make(keep=9)
    save(again, 6)
    assert [path.name for path in again.catalog.set_aside(5)] == ["unconfirmed--step-00000006"]
    assert len(names(directory)) == 4, "nothing is removed"


def test_a_step_that_is_saved_twice_is_written_once(make, directory) -> None:
    checkpoints = make(keep=1)
    save(checkpoints, 1)
    before = (directory / "step-00000001/__0_0.distcp").stat()
    checkpoints.save(1, {}, json.dumps({"step": 1}), best=None)
    checkpoints.save(1, {}, json.dumps({"step": 1}), best=0.5)
    checkpoints.wait()
    assert (directory / "step-00000001/__0_0.distcp").stat() == before
    assert checkpoints.catalog.newest().manifest.best == 0.5
    save(checkpoints, 2, best=0.4)
    save(checkpoints, 3)
    assert names(directory) == ["step-00000001", "step-00000003"]


def test_another_state_of_the_same_step_is_another_checkpoint(make, directory) -> None:
    """Weights may change without an update: averaged ones, for instance, that are rated then."""
    for best, name in (0.5, "step-00000001.1"), (None, "step-00000001.3"):  # a second launch
        checkpoints = make(keep=1)
        save(checkpoints, 1)
        checkpoints.save(1, {"weight": torch.full((2,), 7.0)}, "averaged", best=best)
        checkpoints.wait()
        assert names(directory) == [name]
        assert checkpoints.catalog.newest().manifest.text == "averaged"
        assert checkpoints.catalog.newest().manifest.best == 0.5
    rated = choose(directory.parent, best=True)
    assert stored(rated.path, rated.manifest)["weight"].read().tolist() == [7.0, 7.0]
    assert choose(directory.parent, step=1).path == rated.path
    save(checkpoints, 2)
    assert names(directory) == ["step-00000001.3", "step-00000002"], "the best, and the newest"


def test_a_checkpoint_that_its_directory_lists_late(make, directory, monkeypatch) -> None:
    checkpoints = make(keep=2)
    save(checkpoints, 1)
    known, rename, refused = catalog.paths, Path.rename, []

    def tried(path: Path, target: Path) -> Path:
        try:
            return rename(path, target)
        except OSError as error:
            refused.append(error.errno)
            raise

    monkeypatch.setattr(Path, "rename", tried)
    monkeypatch.setattr(catalog, "paths", lambda place: known(place) if refused else {})
    checkpoints.save(1, {"weight": torch.full((2,), 7.0)}, "averaged", best=None)
    checkpoints.wait()
    assert refused == [errno.ENOTEMPTY]
    assert checkpoints.catalog.newest().manifest.text == "averaged"


def test_the_last_state_of_a_step_is_the_newest_by_name(make, directory) -> None:
    checkpoints = make(keep=1)
    for number in range(5):
        checkpoints.save(1, {"weight": torch.full((2,), number)}, str(number), best=None)
        checkpoints.wait()
        assert (
            checkpoints.catalog.newest().manifest.text
            == choose(directory.parent).manifest.text
            == str(number)
        )
        assert len(names(directory)) == 1
    flip_a_bit(directory / "step-00000001.4" / "__0_0.distcp")
    checkpoints = make(keep=1)
    save(checkpoints, 1)
    assert names(directory) == ["step-00000001.4"], "a damaged one is replaced"
    assert whole(make(), 1)


def test_a_state_without_tensors_is_saved(make, directory) -> None:
    checkpoints = make()
    checkpoints.save(1, {}, "text", best=None)
    checkpoints.wait()
    assert checkpoints.catalog.newest().manifest.text == "text"


def test_an_end_waits_for_what_is_being_written(make, directory) -> None:
    checkpoints = make()
    checkpoints.save(1, state(1), "", best=None)
    checkpoints.close(10.0)
    assert names(directory) == ["step-00000001"]


def test_a_step_that_another_launch_saved_is_kept(make, directory) -> None:
    save(make(), 1)
    before = (directory / "step-00000001/__0_0.distcp").stat()
    save(make(), 1, best=0.5)
    assert (directory / "step-00000001/__0_0.distcp").stat() == before
    assert names(directory) == ["step-00000001"]
    assert make().catalog.newest().manifest.best == 0.5


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("file", ["__0_0.distcp", ".metadata", "manifest.json"])
@pytest.mark.parametrize("damage", [flip_a_bit, truncate, empty, Path.unlink])
def test_flipped_bit_truncated_or_missing_file_is_skipped(
    make, directory, warned, file: str, damage: Callable[[Path], None]
) -> None:
    save(make(), 1, 2)
    damage(directory / "step-00000002" / file)
    checkpoints = make()
    if file == "manifest.json" and damage is truncate:  # its last byte is the end of the line
        assert whole(checkpoints, 2)
        return
    assert whole(checkpoints, 1)
    assert len(warned) == 1
    assert f"{directory}/step-00000002 is skipped" in warned[0]
    save(checkpoints, 2)
    assert whole(make(), 2)


def test_damaged_ones_stand_in_for_none_that_is_kept(make, directory, warned) -> None:
    save(make(keep=9), 1, 2, 3, 4, 9)
    flip_a_bit(directory / "step-00000009/__0_0.distcp")
    truncate(directory / "step-00000002/__0_0.distcp")
    checkpoints = make(keep=1)
    assert whole(checkpoints, 4)
    save(checkpoints, 5)
    assert names(directory) == ["step-00000005", "step-00000009"]
    assert whole(make(), 5)


def test_nothing_but_damage(make, directory, warned) -> None:
    save(make(), 1, 2)
    for path in directory.glob("step-*"):
        truncate(path / "__0_0.distcp")
    assert make().catalog.newest() is None
    assert len(warned) == 3
    assert "no checkpoint of the 2 in" in warned[-1]


def test_another_runs_checkpoint_is_refused_with_both_values(make) -> None:
    save(make(), 1)
    with pytest.raises(
        RunDirectoryError, match="of another run: seed: 0 recorded, 1 now"
    ) as caught:
        make(identity={**IDENTITY, "seed": 1}).catalog.newest()
    assert "--fresh" in caught.value.hint


def test_another_runs_checkpoint_is_not_removed(make, directory) -> None:
    other = make(identity={**IDENTITY, "seed": 1}, keep=1)
    save(make(), 5)
    save(other, 1, 2)
    assert names(directory) == ["step-00000002", "step-00000005"]


def test_newer_version_is_skipped_and_left_alone(make, directory, warned) -> None:
    save(make(), 1, 2)
    path = directory / "step-00000002/manifest.json"
    content = {**json.loads(path.read_text()), "format": 9, "lockstep": "7.0"}
    path.write_text(json.dumps(content))
    checkpoints = make(keep=1)
    assert whole(checkpoints, 1)
    assert "format 9, written by Lockstep 7.0; expected format 2" in warned[0]
    save(checkpoints, 3)
    assert names(directory) == ["step-00000002", "step-00000003"]


def test_other_files_are_nobodys_business(make, directory) -> None:
    save(make(), 1)
    (directory / "step-1").mkdir()
    (directory / "step-00000009x").mkdir()
    (directory / "notes.txt").write_text("mine")
    assert whole(make(), 1)
    save(make(keep=1), 2)
    assert (directory / "notes.txt").exists()


def test_what_a_dead_launch_left_unfinished_is_removed(make, directory) -> None:
    one = make()
    save(one, 1)
    one.close()
    assert not list(directory.glob(".*"))
    mine, theirs = f".draft-{writer._machine()}-dead", ".draft-0ther-alive"
    for drafts in (mine, theirs):
        shutil.copytree(directory / "step-00000001", directory / drafts / "2")
    two = make()
    assert whole(two, 1)
    save(two, 3)
    assert names(directory) == ["step-00000001", "step-00000003"]
    assert not (directory / mine).exists()
    two.close()
    # Where file systems have no locks, a launch on another host may still write.
    assert [path.name for path in directory.glob(".*")] == [theirs]
    for path in (directory / theirs, *(directory / theirs).rglob("*")):
        os.utime(path, (0, 0))
    save(make(), 4)
    assert not (directory / theirs).exists()


WRITER = """
import sys, time, torch
from pathlib import Path
from lockstep.state.checkpoint import dcp
from lockstep.state.checkpoint.catalog import Catalog
from lockstep.state.checkpoint.manager import CheckpointManager
from tests.unit.state.checkpoint.conftest import IDENTITY
from tests.unit.state.checkpoint.test_manager import save
directory, stop = Path(sys.argv[1]), sys.argv[2] == "stop"
checkpoints = CheckpointManager(Catalog(directory, IDENTITY), rank=0, size=1, store=None, keep=2)
save(checkpoints, 1)
if stop:  # in the middle of the next one
    dcp.finish = lambda *_: (print("writing", flush=True), time.sleep(60))
else:
    print("writing", flush=True)
for step in range(2, 100000):
    save(checkpoints, step)
"""


@pytest.mark.wide(beyond=2)
@pytest.mark.parametrize("seconds", ["stop", 0.02, 0.137])
def test_kill_9_while_a_checkpoint_is_written(make, directory, warned, seconds) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(directory), str(seconds)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        if seconds != "stop":
            time.sleep(seconds)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=10)
    checkpoints = make()
    found = checkpoints.catalog.newest()
    assert found is not None
    assert whole(checkpoints, found.manifest.step)
    assert not warned
    if seconds == "stop":
        assert found.manifest.step == 1
        assert len(list(directory.glob(".draft-*/*"))) == 1
    save(checkpoints, found.manifest.step + 1)
    assert not list(directory.glob(".draft-*/*"))


def mount(*words: str | Path) -> bool:
    program = shutil.which("mount")
    return (
        program is not None
        and not subprocess.run(
            [program, *map(str, words)], capture_output=True, check=False
        ).returncode
    )


def unmount(path: Path) -> None:
    subprocess.run([shutil.which("umount") or "", "--lazy", str(path)], check=True)


@contextlib.contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    """A file system of a few bytes, where this user may mount one."""
    path.mkdir()
    if not mount("-t", "tmpfs", "-o", f"size={size}", "lockstep-test", path):
        pytest.skip("only root can mount a file system")
    try:
        yield
    finally:
        unmount(path)


@contextlib.contextmanager
def read_only(path: Path) -> Iterator[None]:
    """The same file system, over itself, for reading alone."""
    assert mount("--bind", path, path)
    try:
        assert mount("-o", "remount,bind,ro", path)
        yield
    finally:
        unmount(path)


def test_disk_full_while_saving(make, tmp_path) -> None:
    with small_disk(tmp_path / "disk", "256k"):
        directory = tmp_path / "disk/checkpoints"
        checkpoints = make(directory)
        save(checkpoints, 1)
        large = {"w": torch.randn(100_000)}
        checkpoints.save(2, large, "", best=None)
        with pytest.raises(CheckpointError, match="step-00000002 cannot be written: No space") as e:
            checkpoints.wait()
        assert "LOCKSTEP_KEEP" in e.value.hint
        assert names(directory) == ["step-00000001"]
        checkpoints.save(3, large, "", best=None)
        with pytest.raises(CheckpointError, match="step-00000003 cannot be written: No space"):
            checkpoints.save(4, large, "", best=None)
        save(checkpoints, 3)  # with room enough, it goes on
        assert whole(checkpoints, 3)
        checkpoints.close()


def test_permission_denied_while_saving(make, tmp_path) -> None:
    with small_disk(tmp_path / "disk", "1m"):
        checkpoints = make(tmp_path / "disk/checkpoints")
        save(checkpoints, 1)
        with read_only(tmp_path / "disk"):
            checkpoints.save(2, state(2), "", best=None)
            with pytest.raises(CheckpointError, match="cannot be written: Read-only") as caught:
                checkpoints.wait()
            assert "--run-dir" in caught.value.hint
            assert whole(checkpoints, 1)
            late = make(tmp_path / "disk/checkpoints")
            with pytest.raises(CheckpointError, match="checkpoints cannot be written: Read-only"):
                late.save(2, state(2), "", best=None)
        save(checkpoints, 2)
        checkpoints.close()


def test_a_place_that_is_no_directory(make, directory) -> None:
    directory.write_text("")
    with pytest.raises(CheckpointError, match="cannot be written: File exists"):
        make().save(1, state(1), "", best=None)
    with pytest.raises(CheckpointError, match="cannot be read: Not a directory"):
        make().catalog.newest()


def test_a_directory_that_vanishes(make, directory) -> None:
    checkpoints = make()
    save(checkpoints, 1)
    shutil.rmtree(directory)
    checkpoints.save(2, state(2), "", best=None)
    with pytest.raises(CheckpointError, match="cannot be written: No such file or directory"):
        checkpoints.wait()
    assert checkpoints.catalog.newest() is None


def test_best_of_a_checkpoint_that_is_gone(make, directory) -> None:
    checkpoints = make()
    save(checkpoints, 1)
    shutil.rmtree(directory / "step-00000001")
    checkpoints.save(1, state(1), json.dumps({"step": 1}), best=1.0)
    with pytest.raises(CheckpointError, match=r"manifest\.json is missing"):
        checkpoints.wait()
    save(checkpoints, 1)
    assert whole(checkpoints, 1)


def test_close_drops_what_is_written(make, directory, monkeypatch) -> None:
    store, written = dist.HashStore(), []
    told = {"written": lambda *event: written.append(event)}
    checkpoints = make(rank=0, size=2, store=store, patience=60, **told)
    other = make(rank=1, size=2, store=store)
    with ThreadPoolExecutor(1) as pool:
        # The other rank's part never comes: it has agreed to write, and no more.
        met = pool.submit(DraftDirectory.open, directory, other._channel, 1)
        checkpoints.save(1, state(1), "", best=None)
        met.result(timeout=10)
    begin = time.monotonic()
    checkpoints.close()
    assert time.monotonic() - begin < 3
    assert not list(directory.iterdir())
    assert not written, "what was dropped is not told of as written"


class Ranks:
    """Several ranks, as threads of this process."""

    def __init__(self, make: Callable[..., Any], places: list[Path], **more: Any) -> None:
        self.store = dist.HashStore()
        size = len(places)
        self.all = [
            make(place, rank=rank, size=size, store=self.store, **more)
            for rank, place in enumerate(places)
        ]

    def do(self, what: Callable[[Any], Any]) -> list[Any]:
        """Do something on all ranks at once; return what each returned or raised."""

        def guarded(one: Any) -> Any:
            try:
                return what(one)
            except CheckpointError as error:
                return error

        with ThreadPoolExecutor(len(self.all)) as pool:
            return list(pool.map(guarded, self.all, timeout=30))


def test_ranks_that_share_no_directory_leave_it_to_the_others(make, tmp_path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    ranks = Ranks(make, [here, there, here])
    assert ranks.do(lambda one: save(one, 1, 2)) == [None] * 3
    assert not there.exists()
    assert whole(make(here), 2)
    assert len(list((here / "step-00000002").glob("*.distcp"))) == 2


def test_a_rank_that_cannot_write_is_named_by_all(make, directory, monkeypatch) -> None:
    ranks = Ranks(make, [directory] * 3)
    ranks.do(lambda one: save(one, 1))
    write_part = dcp.write_part

    def full(place: Path, part: int, *rest: Any) -> Any:
        if part == 1 and place.name == "2":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_part(place, part, *rest)

    monkeypatch.setattr(dcp, "write_part", full)
    first, second, third = ranks.do(lambda one: save(one, 2))
    assert "step-00000002 cannot be written: No space left on device" in second.message
    for error in (first, third):
        assert "cannot be written: rank 1: No space left on device" in error.message
        assert "LOCKSTEP_KEEP" in error.hint
    assert ranks.do(lambda one: save(one, 3)) == [None] * 3
    assert names(directory) == ["step-00000001", "step-00000003"]


def test_a_main_rank_that_cannot_commit_tells_the_others(make, directory, monkeypatch) -> None:
    ranks = Ranks(make, [directory, directory.with_name("else")])
    monkeypatch.setattr(catalog, "write_manifest", lambda *_: 1 / 0)
    errors = ranks.do(lambda one: save(one, 1))
    assert "cannot be written: ZeroDivisionError: division by zero" in errors[0].message
    assert "rank 0: ZeroDivisionError" in errors[1].message
    assert names(directory) == []


def test_a_rank_that_writes_nothing_is_named(make, directory, monkeypatch) -> None:
    ranks = Ranks(make, [directory] * 2, patience=0.5)
    write_part = dcp.write_part

    def slow(place: Path, part: int, *rest: Any) -> Any:
        if part == 1:
            time.sleep(1.5)
        return write_part(place, part, *rest)

    monkeypatch.setattr(dcp, "write_part", slow)
    first, _ = ranks.do(lambda one: save(one, 1))
    assert "rank 1 wrote nothing to" in first.message
    assert "for 0.5 s" in first.message


def test_a_rank_that_does_not_save_is_named(make, directory) -> None:
    checkpoints = make(rank=0, size=3, store=dist.HashStore(), patience=0.2)
    with pytest.raises(CheckpointError, match=r"rank 1, rank 2 did not come within 0\.2 s"):
        checkpoints.save(1, state(1), "", best=None)


def test_a_main_rank_that_cannot_write_at_all(make, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    ranks = Ranks(make, [tmp_path / "file", tmp_path / "there"])
    errors = ranks.do(lambda one: save(one, 1))
    assert "file cannot be written: File exists" in errors[0].message
    assert "rank 0: File exists" in errors[1].message
    (tmp_path / "file").unlink()
    assert ranks.do(lambda one: save(one, 2)) == [None] * 2, "what has failed may be tried again"
    assert names(tmp_path / "file") == ["step-00000002"]
