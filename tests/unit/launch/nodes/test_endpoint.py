"""Where launchers meet: a file that several use, of which one may be killed; the host of a store."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from lockstep.errors import UsageError, WorldError
from lockstep.launch.nodes import endpoint
from lockstep.launch.nodes.config import RendezvousConfig
from lockstep.launch.nodes.endpoint import RendezvousFile, host_lock
from lockstep.world import network
from tests.conftest import Lockstep
from tests.unit.threads import together

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
    """Leave as a launcher does that ends."""
    file.close()
    file._lock = -1


def die(file: RendezvousFile) -> None:
    """Leave as a process does that is killed."""
    os.close(file._lock)
    file._lock = -1


def meet(files: list[RendezvousFile]) -> None:
    """Check that all have one store, in which there is nothing yet."""
    assert sorted(file.store.add("arrivals", 1) for file in files) == list(range(1, len(files) + 1))


def test_launchers_meet_and_leave_nothing(opened: Opener, tmp_path: Path) -> None:
    for _ in range(3):
        files = [opened() for _ in range(3)]
        meet(files)
        for file in files:
            assert list(tmp_path.iterdir()), "the files stay until the last has left"
            leave(file)
        assert list(tmp_path.iterdir()) == []


def test_many_launches_at_the_heels_of_others(tmp_path: Path) -> None:
    # Each pair meets, whenever the pair before removes its files.
    def launcher() -> list[int]:
        numbers = []
        for _ in range(5):
            file = RendezvousFile(tmp_path, NAME)
            numbers.append(file.store.add("arrivals", 1))
            del file.store  # torch's looks at its file once more when it goes
            barrier.wait(5)
            leave(file)
            barrier.wait(5)
        return numbers

    barrier = threading.Barrier(2)
    one, two = together(launcher, launcher)
    assert [sorted(pair) for pair in zip(one, two, strict=True)] == [[1, 2]] * 5


@pytest.mark.parametrize("left", [None, b"", b"no store at all", b"\xff" * 200])
def test_a_stale_file_is_replaced(left: bytes | None, opened: Opener) -> None:
    files = [opened(), opened()]
    meet(files)
    for file in files:
        die(file)
    if left is not None:
        files[0]._path.write_bytes(left)
    meet([opened(), opened()])


def test_the_file_of_a_killed_launcher_is_replaced(
    opened: Opener, tmp_path: Path, lockstep: Lockstep
) -> None:
    code = f"""
import time
from pathlib import Path
from lockstep.launch.nodes.endpoint import RendezvousFile
RendezvousFile(Path({str(tmp_path)!r}), {NAME!r}).store.add("arrivals", 1)
print("here", flush=True)
time.sleep(60)
"""
    killed = lockstep.start("-c", code, program=())
    assert killed.stdout is not None
    assert killed.stdout.readline() == "here\n"
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait(10)
    assert (tmp_path / "lockstep-nodes-abc-2").exists()
    meet([opened(), opened()])


def test_files_removed_by_hand(opened: Opener, tmp_path: Path) -> None:
    old = opened()
    for path in tmp_path.iterdir():
        path.unlink()
    new = opened()
    leave(old)
    assert len(list(tmp_path.iterdir())) == 2, "they are the new launch's"
    meet([new, opened()])


# Directories that won't do.


def refuse(code: int) -> Callable[..., int]:
    def call(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    return call


def test_directories_in_which_no_launcher_meets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    for name in ("nowhere", "file"):
        with pytest.raises(UsageError, match=rf"the directory .*/{name} does not exist on "):
            RendezvousFile(tmp_path / name, NAME)
    with pytest.raises(UsageError, match="cannot be written: file name too long"):
        RendezvousFile(tmp_path, "x" * 300)
    with monkeypatch.context() as patch:
        patch.setattr(endpoint.os, "open", refuse(errno.EACCES))
        with pytest.raises(UsageError, match="cannot be written: permission denied"):
            RendezvousFile(tmp_path, NAME)
    monkeypatch.setattr(fcntl, "flock", refuse(errno.ENOLCK))
    with pytest.raises(UsageError, match="has no locks: no locks available") as caught:
        RendezvousFile(tmp_path, NAME)
    assert "--rdzv-endpoint HOST" in (caught.value.hint or "")


# The host of a store.


def test_one_launcher_of_a_host_holds_the_lock(tmp_path: Path) -> None:
    name = str(tmp_path)
    with host_lock(name) as first, host_lock(name) as second, host_lock(f"{name} other") as other:
        assert (first, second, other) == (True, False, True)
    for held in (False, True):
        with contextlib.ExitStack() as stack:
            if held:
                stack.enter_context(host_lock(name))
            with pytest.raises(OSError, match="no space"), host_lock(name):
                raise OSError(errno.ENOSPC, "no space")


def test_a_launch_that_has_met_gives_up_the_lock(tmp_path: Path) -> None:
    name = str(tmp_path)
    where = RendezvousConfig(name=name, count=2, address="127.0.0.1", source="--x", seconds=1.0)
    place = endpoint.enter(where, lambda: None)
    assert place.hosts
    with host_lock(name) as is_free:
        assert not is_free
    place.stop_announcing()
    with host_lock(name) as is_free:
        assert is_free
    place.close()


def test_a_lock_whose_holder_does_not_answer(tmp_path: Path) -> None:
    where = RendezvousConfig(
        name=str(tmp_path), count=2, address="127.0.0.1", source="--x", seconds=0.2
    )
    with host_lock(where.name), pytest.raises(WorldError, match="no rendezvous") as caught:
        endpoint.enter(where, lambda: None)
    assert "--rdzv-id" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("address", "here"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("203.0.113.7", False)],
)
def test_whether_an_endpoint_is_here(address: str, here: bool) -> None:
    assert network.is_here(address) == here
