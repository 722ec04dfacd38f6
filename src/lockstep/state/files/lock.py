"""Lock of a run directory, so that only one launch uses it at a time; the lock ends with the launch.

Rank 0 locks the file `.lock` with `flock`. While ranks restart, no process holds the `flock`. So the file
also names the launcher: as long as the launcher's process lives, no other launch on its host gets the lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import time
import weakref
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import RunDirectoryError
from lockstep.state.files.run_file import writing
from lockstep.world import host
from lockstep.world.model import World

if TYPE_CHECKING:
    import torch.distributed as dist

NAME = ".lock"
#: Process id of the launcher, for its workers.
LAUNCHER_VARIABLE = "LOCKSTEP_LAUNCHER_PID"
#: Seconds to wait for the processes of a launch that has just ended to exit.
_PATIENCE = 2.0
_LOOK = 0.05
#: Error numbers of a file system without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class LockOwner:
    """The process that owns the lock of a run directory: the launcher, or rank 0 without a launcher."""

    host: str
    machine: str  # boot and network namespace, which distinguish hosts of one name
    pid: int
    born: int  # when it was made, in clock ticks since the host's start
    launch: str | None  # name of the launch

    @staticmethod
    def of(environment: str, environ: Mapping[str, str], launch: str | None) -> LockOwner:
        """Return the owner of a lock that this rank takes: a launcher that restarts ranks, or the rank.

        `environment` is the name of the launcher, such as `torchrun`; `launch` is the name of the launch.
        """
        pid = os.getpid()
        if environment == "lockstep":
            pid = int(environ.get(LAUNCHER_VARIABLE, pid))
        elif environment == "torchrun":
            pid = os.getppid()
        return LockOwner(host.name(), host.identity(), pid, _born(pid) or 0, launch)

    @property
    def lives(self) -> bool:
        """Whether the owner's process exists on this host; always `False` for a process of another host."""
        return self.machine == host.identity() and self.born > 0 and _born(self.pid) == self.born

    def is_launch_of(self, other: LockOwner) -> bool:
        """Whether this owner and `other` belong to one launch."""
        if self.launch is not None and self.launch == other.launch:
            return True
        return (self.machine, self.pid, self.born) == (other.machine, other.pid, other.born)


class DirectoryLock:
    """The lock of a run directory; the constructor takes it, and waits a little for it.

    Raises:
        RunDirectoryError: if another launch uses the directory, or the lock file cannot be made.
    """

    def __init__(self, directory: Path, owner: LockOwner) -> None:
        self._path, self._owner = directory / NAME, owner
        self._file: int | None = None
        deadline = time.monotonic() + _PATIENCE
        with writing(directory):
            while (other := self._try()) is not None:
                if time.monotonic() > deadline:
                    raise RunDirectoryError(
                        f"the run directory {directory} is in use by another launch: {other}; expected one "
                        "at a time",
                        hint="wait for its end, or name another directory with --run-dir",
                    )
                time.sleep(_LOOK)

    def _try(self) -> str | None:
        """Try to take the lock; return `None` on success, or else a text that names the lock's owner."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            is_free = _lock(file)
            other = _read(file)
            if other is not None and other.is_launch_of(self._owner):
                other = None
            elif not is_free or (other is not None and other.lives):
                return (
                    "another process" if other is None else f"process {other.pid} on {other.host}"
                )
            if not is_free:
                return None
            if not os.fstat(file).st_nlink:  # it was removed meanwhile
                return "a launch that ends"
            os.ftruncate(file, 0)
            os.pwrite(file, json.dumps(asdict(self._owner)).encode(), 0)
            self._file = file
            _locks.add(self)
            return None
        finally:
            if self._file != file:
                os.close(file)

    def release(self, *, ends: bool) -> None:
        """Close the lock file, and remove it if the run `ends`.

        Otherwise the file stays and names the launcher, which may restart the ranks.
        """
        if self._file is None:
            return
        if ends or self._owner.pid == os.getpid():
            with contextlib.suppress(OSError):
                self._path.unlink()
        self.close()

    def close(self) -> None:
        """Close the lock's file; the lock lasts until all processes that share the file have closed it."""
        if self._file is not None:
            os.close(self._file)
        self._file = None
        _locks.discard(self)


def nodes_apart(store: dist.Store, directory: Path, world: World) -> str:
    """Return a warning that names the nodes which do not share the main rank's `directory`, or `""`.

    The first rank of each node compares the lock file in its `directory` with that of the main rank. Only
    the main rank returns the warning; the result is `""` on all other ranks.
    """
    if world.is_main:
        store.set("lock", _text(directory))
        told = {node: store.get(f"apart/{node}").decode() for node in range(1, world.node_count)}
        apart = " and ".join(f"node {node} ({name})" for node, name in told.items() if name)
        return apart and (
            f"lockstep: warning: {directory} is not shared: on {apart} it is another directory, and a "
            "checkpoint is lost with the machine that wrote it; hint: --run-dir on a file system, or a "
            "volume, that all nodes share"
        )
    if world.node_rank > 0 and world.local_rank == 0:
        expected, deadline = store.get("lock").decode(), time.monotonic() + _PATIENCE
        while _text(directory) != expected and time.monotonic() < deadline:
            time.sleep(_LOOK)  # a network file system shows new files late
        name = "" if _text(directory) == expected else host.name()
        store.set(f"apart/{world.node_rank}", name)
    return ""


def _text(directory: Path) -> str:
    try:
        return (directory / NAME).read_text()
    except OSError:
        return ""


def leave(directory: Path) -> None:
    """Remove the lock file in `directory` if this process owns it, so that other launches can lock it."""
    path = directory / NAME
    with contextlib.suppress(OSError), path.open("r+b", buffering=0) as opened:
        file = opened.fileno()
        owner = _read(file)
        if owner is not None and owner.pid == os.getpid() and owner.lives and _lock(file):
            path.unlink()


def in_use(directory: Path, own: LockOwner | None = None) -> bool | None:
    """Return whether a launch uses `directory`, apart from the launch of `own`; `None` if unknown.

    It is unknown if the owner is on another host, or the lock file cannot be read. The check takes the lock
    for a moment; a launch that fails to take the lock at that moment tries again.
    """
    try:
        opened = (directory / NAME).open("r+b", buffering=0)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        with opened:
            file = opened.fileno()
            owner = _read(file)
            is_own = owner is not None and own is not None and owner.is_launch_of(own)
            if not is_own and not _lock(file, fcntl.LOCK_SH):
                return True
            if owner is None or is_own or owner.lives:
                return owner is not None and not is_own
            return False if owner.machine == host.identity() else None
    except OSError:
        return None


def status(recorded: str, used: bool | None) -> str:
    """Return the present status of a run whose `run.json` states the status `recorded`.

    `used` is the result of `in_use` for the run's directory. A run recorded as `running` is `dead` if no
    launch uses the directory; a run recorded as `failed` is `running` if a launch does.
    """
    if recorded == "failed" and used:
        return "running"
    return "dead" if recorded == "running" and used is False else recorded


_locks: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """Close inherited lock files in a forked process, so that it holds no lock of its parent."""
    for lock in list(_locks):
        lock.close()


os.register_at_fork(after_in_child=_leave_to_parent)


def _lock(file: int, kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _read(file: int) -> LockOwner | None:
    """Return the owner that is named in an open lock file; `None` if the file is empty or damaged."""
    try:
        fields = json.loads(os.pread(file, 4096, 0))
        names = str(fields["host"]), str(fields["machine"])
        return LockOwner(*names, int(fields["pid"]), int(fields["born"]), fields["launch"])
    except (ValueError, TypeError, KeyError):
        return None


def _born(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; `None` if it has exited."""
    fields = host.process_fields(pid)
    return None if fields[:1] in ([], ["Z"]) else int(fields[19])
