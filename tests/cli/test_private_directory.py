"""A launcher's private directory: which of those that others have left it removes, and where ranks meet."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from lockstep.launch.run_directory import private_directory
from lockstep.world import host
from tests.conftest import Lockstep

#: The command on a machine whose TMPDIR has no locks: torch's FileStore would fail.
WITHOUT_LOCKS = """
import errno, fcntl, os
import torch.distributed

def fails(*_):
    raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

fcntl.flock = torch.distributed.FileStore = fails
from lockstep.cli import main
raise SystemExit(main())
"""
RUN = """
import lockstep
with lockstep.Run("meets", replicas=2, progress=False) as run:
    print("met", run.world.size)
"""


@pytest.mark.parametrize(("machine", "goes"), [(host.identity(), True), ("another", False)])
def test_only_this_hosts_directories_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, goes: bool
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left, logs = tmp_path / "lockstep-left", tmp_path / "train-logs-left"
    left.mkdir()
    logs.mkdir()
    (left / "launcher.lock").write_text(machine)
    (left / "logs").symlink_to(logs)
    with private_directory() as private:
        assert (private / "launcher.lock").read_text() == host.identity()
        assert (left.exists(), logs.exists()) == (not goes, not goes)
    assert not private.exists()


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> None:
        raise OSError(38, os.strerror(38))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(fcntl, "flock", flock)
    with private_directory() as private:
        assert not (private / "launcher.lock").exists(), "what tells that ranks meet at a port"
    assert not private.exists()


@pytest.mark.ranks(2)
@pytest.mark.forked
def test_ranks_meet_at_a_port_where_files_cannot_be_locked(lockstep: Lockstep) -> None:
    lockstep.script(RUN)
    launcher = lockstep.script(WITHOUT_LOCKS, "launcher.py")
    done = lockstep.python(launcher, "run", "-n", "2", "train.py")
    assert done.code == 0, done.err
    assert "met 2" in done.out
