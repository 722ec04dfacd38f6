"""Rendezvous files in a directory that other users may write to, such as `/tmp`."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.errors import WorldError
from lockstep.launch.nodes.endpoint import RendezvousFile
from lockstep.world.rendezvous.private_file import open_private
from lockstep.world.rendezvous.store import open_file

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
STRANGER = 65534


@pytest.fixture
def shared() -> Iterator[Path]:
    """A directory like `/tmp`, and in it: all write, and nobody removes what is another's."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


@contextlib.contextmanager
def as_stranger() -> Iterator[None]:
    """Be another user in the body."""
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(STRANGER)
    os.seteuid(STRANGER)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def plant(path: Path, target: Path | None = None) -> None:
    """Put a file that all may write there as another user, or a link."""
    if target is None:
        path.touch()
        path.chmod(0o666)
    else:
        path.symlink_to(target)
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_no_other_user_reads_the_file_of_a_store(shared: Path) -> None:
    (shared / "older").touch(0o644)
    for name in ("new", "older"):
        store = open_file(shared / name)
        store.set("secret", "x")
        assert mode(shared / name) == 0o600


def test_no_other_user_reads_the_files_of_launchers(shared: Path) -> None:
    file = RendezvousFile(shared, "abc")
    file.store.set("secret", "x")
    assert {path.name: mode(path) for path in shared.iterdir()} == {
        "lockstep-abc": 0o600,
        "lockstep-abc.lock": 0o600,
    }
    file.close()
    assert not list(shared.iterdir())


@needs_root
@pytest.mark.parametrize("linked", [False, True])
def test_what_another_user_has_put_there_is_refused(
    shared: Path, tmp_path: Path, linked: bool
) -> None:
    target = tmp_path / "precious"
    target.write_text("kept")
    said = "is a symbolic link" if linked else f"belongs to the user with id {STRANGER}"
    for name in ("file", "lockstep-a", "lockstep-b.lock"):
        plant(shared / name, target if linked else None)
    with pytest.raises(WorldError, match=said):
        open_file(shared / "file")
    for name in ("a", "b"):
        with pytest.raises(WorldError, match=said):
            RendezvousFile(shared, name)
    assert (target.read_text(), mode(target)) == ("kept", 0o644)
    assert (shared / "lockstep-a").is_symlink() == linked, "it is another user's, and stays"


@needs_root
def test_another_user_reads_no_secret_and_takes_no_name(shared: Path) -> None:
    open_file(shared / "file").set("secret", "x")
    with as_stranger():
        (shared / "own").touch()  # it comes to the directory
        for flags in (os.O_RDONLY, os.O_WRONLY):
            with pytest.raises(PermissionError):
                os.open(shared / "file", flags)
        with pytest.raises(PermissionError):
            (shared / "file").unlink()


def test_what_is_no_file(shared: Path) -> None:
    os.mkfifo(shared / "pipe")
    with pytest.raises(WorldError, match="is no regular file"):
        open_private(shared / "pipe")
    with pytest.raises(OSError, match="No such file"):
        open_private(shared / "missing" / "file")
