"""The lock of a run directory: one launch at a time, whatever becomes of its processes."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.errors import RunDirectoryError
from lockstep.state.files import lock
from lockstep.state.files.lock import DirectoryLock, LockOwner
from lockstep.world import host

MINE = LockOwner.of("single", {}, "mine")
#: Another launch, whose launcher lives as long as these tests.
LIVING = dataclasses.replace(MINE, pid=os.getppid(), born=lock._born(os.getppid()), launch="other")
GONE = dataclasses.replace(LIVING, born=1)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "_PATIENCE", 0.1)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock, as rank 0 of a launch named `elsewhere`."""
    code = (
        "import sys, pathlib; from lockstep.state.files.lock import DirectoryLock, LockOwner\n"
        "held = DirectoryLock(pathlib.Path(sys.argv[1]), LockOwner.of('single', {}, 'elsewhere'))\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_another_process_holds_it_until_it_dies(tmp_path: Path, elsewhere) -> None:
    expected = rf"in use by another launch: process {elsewhere.pid} on {host.name()}; expected one"
    with pytest.raises(RunDirectoryError, match=expected) as caught:
        DirectoryLock(tmp_path, MINE)
    assert "--run-dir" in caught.value.hint
    of_its_launch = dataclasses.replace(MINE, launch="elsewhere")
    DirectoryLock(tmp_path, of_its_launch).release(ends=True)
    assert (tmp_path / lock.NAME).exists(), "the other one holds it"
    elsewhere.kill()
    elsewhere.wait()
    DirectoryLock(tmp_path, MINE).release(ends=True)
    assert not (tmp_path / lock.NAME).exists()


def test_while_ranks_are_restarted_their_launcher_keeps_the_directory(tmp_path: Path) -> None:
    DirectoryLock(tmp_path, LIVING).release(ends=False)
    with pytest.raises(RunDirectoryError, match=f"process {LIVING.pid} on"):
        DirectoryLock(tmp_path, MINE)
    DirectoryLock(tmp_path, LIVING).release(ends=False)
    DirectoryLock(tmp_path, dataclasses.replace(LIVING, machine="other")).release(ends=False)


def test_the_lock_of_a_launcher_that_is_gone_is_taken(tmp_path: Path) -> None:
    DirectoryLock(tmp_path, GONE).release(ends=False)
    DirectoryLock(tmp_path, MINE).release(ends=True)
    (tmp_path / lock.NAME).write_text('{"host": 3')
    mine = DirectoryLock(tmp_path, MINE)
    assert lock.json.loads((tmp_path / lock.NAME).read_text()) == dataclasses.asdict(MINE)
    mine.release(ends=True)


def test_a_run_that_fails_in_a_process_that_lives_on_leaves_nothing(tmp_path: Path) -> None:
    DirectoryLock(tmp_path, MINE).release(ends=False)
    assert not (tmp_path / lock.NAME).exists()
    left = dataclasses.replace(MINE, launch="an earlier one")
    (tmp_path / lock.NAME).write_text(lock.json.dumps(dataclasses.asdict(left)))
    lock.leave(tmp_path)
    assert not (tmp_path / lock.NAME).exists()


def test_a_child_does_not_keep_it(tmp_path: Path) -> None:
    held = DirectoryLock(tmp_path, MINE)
    reader, writer = os.pipe()
    started, begins = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writer)
        os.write(begins, b"x")
        os.read(reader, 1)  # until the parent is done
        os._exit(0)
    os.read(started, 1)  # its functions after a fork have run
    try:
        held.close()
        (tmp_path / lock.NAME).write_text("")
        DirectoryLock(tmp_path, dataclasses.replace(MINE, pid=1, launch="x")).release(ends=True)
    finally:
        for end in (reader, writer, started, begins):
            os.close(end)
        os.waitpid(child, 0)


def test_the_launcher_is_responsible_for_its_ranks() -> None:
    assert LockOwner.of("lockstep", {lock.LAUNCHER_VARIABLE: "1"}, "x").pid == 1
    assert LockOwner.of("torchrun", {}, None).pid == os.getppid()
    assert LockOwner.of("slurm", {}, None).pid == os.getpid()


def test_whether_a_directory_is_in_use(tmp_path: Path, elsewhere) -> None:
    assert lock.in_use(tmp_path), "the lock is held"
    elsewhere.kill()
    elsewhere.wait()
    assert lock.in_use(tmp_path) is False, "the lock is left behind"
    (tmp_path / lock.NAME).write_text(json.dumps(dataclasses.asdict(LIVING)))
    assert lock.in_use(tmp_path), "ranks are between two generations: the launcher lives"
    assert lock.in_use(tmp_path, LIVING) is False, "a launch's own use does not count"
    assert lock.in_use(tmp_path, dataclasses.replace(LIVING, pid=os.getpid(), launch="x"))
    there = dataclasses.replace(LIVING, machine="another")
    (tmp_path / lock.NAME).write_text(json.dumps(dataclasses.asdict(there)))
    assert lock.in_use(tmp_path) is None
    (tmp_path / lock.NAME).unlink()
    assert lock.in_use(tmp_path) is False


def test_to_look_whether_a_directory_is_in_use_takes_nothing(tmp_path: Path) -> None:
    held = DirectoryLock(tmp_path, MINE)
    assert lock.in_use(tmp_path)
    held.release(ends=True)
    assert lock.in_use(tmp_path) is False
    DirectoryLock(tmp_path, MINE).release(ends=True)
