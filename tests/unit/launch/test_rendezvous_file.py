"""Launchers that are threads, and one that is killed, meet in a file."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from lockstep.errors import UsageError, WorldError
from lockstep.launch import rendezvous_file
from lockstep.launch.rendezvous_file import RendezvousFile
from tests.conftest import Lockstep
from tests.unit.threads import Party, together

NAME = "nodes/abc/2"

Opener = Callable[..., RendezvousFile]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opener]:
    """Open files that are closed at the end."""
    files: list[RendezvousFile] = []

    def one(name: str = NAME) -> RendezvousFile:
        files.append(RendezvousFile(tmp_path, name))
        return files[-1]

    yield one
    for file in files:
        if file._lock >= 0:
            file.close()


def leave(file: RendezvousFile) -> None:
    """Leave as a launch does that ends."""
    file.close()
    file._lock = -1


def die(file: RendezvousFile) -> None:
    """Leave as a process does that is killed."""
    os.close(file._lock)
    file._lock = -1


def go_on() -> None:
    pass


def meet(file: RendezvousFile, count: int = 2, seconds: float = 5) -> tuple[int, dist.Store]:
    return file.meet(count, seconds, go_on)


def meet_all(files: list[RendezvousFile], seconds: float = 5) -> list[Any]:
    return together(*(lambda one=file: meet(one, len(files), seconds) for file in files))


def check_met(found: list[Any]) -> None:
    """Check that launchers are numbered, and reach each other."""
    assert not [one for one in found if isinstance(one, BaseException)], found
    assert sorted(index for index, _ in found) == list(range(len(found)))
    for index, store in found:
        store.set(f"word/{index}", f"of {index}")
    for _, store in found:
        assert store.get(f"word/{len(found) - 1}").decode() == f"of {len(found) - 1}"


# Meeting.


@pytest.mark.parametrize("count", [1, 2, 5])
def test_launchers_meet_and_leave_nothing(count: int, opened: Opener, tmp_path: Path) -> None:
    files = [opened() for _ in range(count)]
    check_met(meet_all(files))
    for file in files:
        assert list(tmp_path.iterdir()), "the files stay until the last has left"
        leave(file)
    assert list(tmp_path.iterdir()) == []


def test_two_launches_in_one_directory(opened: Opener) -> None:
    files = [opened(f"nodes/{name}/2") for name in "abab"]
    found = together(*(lambda one=file: meet(one) for file in files))
    check_met(found[::2])
    check_met(found[1::2])


def test_launchers_that_come_late(opened: Opener) -> None:
    first = Party(lambda: meet(opened(), 3))
    time.sleep(0.1)
    second = Party(lambda: meet(opened(), 3))
    time.sleep(0.1)
    check_met([meet(opened(), 3), first.end(), second.end()])


def test_one_launch_after_another(opened: Opener) -> None:
    for _ in range(3):
        files = [opened(), opened()]
        check_met(meet_all(files))
        for file in files:
            leave(file)


def test_many_launches_at_the_heels_of_others(opened: Opener) -> None:
    # Each pair meets, whenever the pair before removes its files.
    def launcher() -> list[int]:
        numbers = []
        for _ in range(5):
            file = RendezvousFile(directory, NAME)
            try:
                numbers.append(meet(file)[0])
                barrier.wait(5)
            finally:
                leave(file)
            barrier.wait(5)
        return numbers

    directory = opened()._path.parent
    barrier = threading.Barrier(2)
    one, two = together(launcher, launcher)
    assert [sorted(pair) for pair in zip(one, two, strict=True)] == [[0, 1]] * 5


# What an earlier launch has left.


def test_a_stale_file_is_replaced(opened: Opener, tmp_path: Path) -> None:
    files = [opened(), opened()]
    check_met(meet_all(files))
    for file in files:
        die(file)
    assert len(list(tmp_path.iterdir())) == 2
    check_met(meet_all([opened(), opened()]))


@pytest.mark.parametrize("left", [b"", b"no store at all", os.urandom(200)])
def test_any_stale_file_is_replaced(left: bytes, opened: Opener) -> None:
    opened()._path.write_bytes(left)
    check_met(meet_all([opened(), opened()]))


def test_a_killed_launcher_leaves_a_file_that_the_next_launch_takes_over(
    opened: Opener, tmp_path: Path, lockstep: Lockstep
) -> None:
    code = f"""
from pathlib import Path
from lockstep.launch.rendezvous_file import RendezvousFile
RendezvousFile(Path({str(tmp_path)!r}), {NAME!r}).meet(2, 60, lambda: print("here", flush=True))
"""
    killed = lockstep.start("-c", code, program=())
    assert killed.stdout is not None
    assert killed.stdout.readline() == "here\n"
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(10)
    assert (tmp_path / "lockstep-nodes-abc-2").exists()
    check_met(meet_all([opened(), opened()]))


def test_the_files_of_a_launch_that_lives_stay(opened: Opener) -> None:
    files = [opened(), opened()]
    found = meet_all(files)
    late = opened()
    with pytest.raises(WorldError, match=r"2 nodes have met in .* already") as caught:
        meet(late)
    assert "--rdzv-id" in (caught.value.hint or "")
    leave(late)
    check_met(found)


def test_a_lock_that_the_launch_before_removed_in_between(opened: Opener, tmp_path: Path) -> None:
    before = opened()
    meet(before, 1)
    early = opened()  # has opened what is removed now
    leave(before)
    early._lock_path.unlink(missing_ok=True)
    check_met(meet_all([early, opened()]))


def test_files_removed_by_hand(opened: Opener, tmp_path: Path) -> None:
    old = opened()
    meet(old, 1)
    for path in tmp_path.iterdir():
        path.unlink()
    first = Party(lambda: meet(opened()))
    time.sleep(0.1)
    leave(old)
    assert len(list(tmp_path.iterdir())) == 2, "they are the new launch's"
    check_met([meet(opened()), first.end()])


# Who does not come.


def test_too_few_come(opened: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_file.host, "name", lambda: "hosta")
    files = [opened(), opened()]
    found = together(*(lambda one=file: meet(one, 4, 0.2) for file in files))
    assert all(isinstance(one, WorldError) for one in found), found
    where = f"{tmp_path}/lockstep-nodes-abc-2"
    said = f"2 of 4 nodes did not come to {where} within 0.2 s; came: hosta, hosta"
    assert {one.message for one in found} == {said}
    assert "is not shared between the nodes" in found[0].hint


def test_one_that_was_killed_before_it_said_its_name(opened: Opener) -> None:
    dying, file = opened(), opened()
    dying._take_lock()
    dist.FileStore(str(dying._path), -1).add("arrivals", 1)
    began = time.monotonic()
    with pytest.raises(WorldError, match="1 of 3 nodes did not come"):
        meet(file, 3, 0.2)
    assert time.monotonic() - began < 2


def test_the_next_launch_after_a_timeout(opened: Opener, tmp_path: Path) -> None:
    file = opened()
    with pytest.raises(WorldError):
        meet(file, 2, 0.1)
    leave(file)
    assert list(tmp_path.iterdir()) == []
    check_met(meet_all([opened(), opened()]))


def test_the_check_ends_it(opened: Opener) -> None:
    def stop() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        opened().meet(2, 5, stop)


# Directories that won't do.


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"the directory .*/nowhere does not exist on "):
        RendezvousFile(tmp_path / "nowhere", NAME)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"the directory .*/file does not exist on "):
        RendezvousFile(tmp_path / "file", NAME)


def test_a_directory_that_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(rendezvous_file.os, "open", refuse)
    with pytest.raises(UsageError, match="cannot be written: permission denied"):
        RendezvousFile(tmp_path, NAME)


def test_a_name_that_is_too_long_for_a_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written: file name too long"):
        RendezvousFile(tmp_path, "x" * 300)


def test_a_directory_without_locks(opened: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    file = opened()
    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        with pytest.raises(UsageError, match="has no locks: no locks available") as caught:
            meet(file)
    assert "--rdzv-endpoint HOST" in (caught.value.hint or "")


def test_a_name_stays_in_its_directory(tmp_path: Path, opened: Opener) -> None:
    meet(opened("nodes/../../x/1"), 1)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"lockstep-nodes-..-..-x-1", "lockstep-nodes-..-..-x-1.lock"}
