"""Lock of a run directory: one launch at a time; the lock ends with its process.

That is rank 0. While ranks are restarted no process holds the lock: so the file also names the launcher,
and as long as that process lives, no other launch on its host takes the lock.
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

from lockstep.errors import RunDirectoryError
from lockstep.state.files.run_file import cannot_write
from lockstep.world import host

NAME = ".lock"
#: Process id of the launcher, for its workers.
LAUNCHER_VARIABLE = "LOCKSTEP_LAUNCHER_PID"
#: Seconds that the processes of a launch that has just ended have to be gone.
_PATIENCE = 2.0
_LOOK = 0.05
#: What a file system answers that has no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that a launch lasts as long as.

    Attributes:
        host: name of its host.
        machine: boot and network namespace, which tell hosts of one name apart.
        pid: its process id there.
        born: when it was made, in clock ticks since the host's start.
        launch: name of the launch; `None` where it has none.
    """

    host: str
    machine: str
    pid: int
    born: int
    launch: str | None

    @staticmethod
    def of(environment: str, environ: Mapping[str, str], launch: str | None) -> Owner:
        """Return the owner of the lock for this rank: its launcher, if there is one that restarts ranks."""
        pid = os.getpid()
        if environment == "lockstep":
            pid = int(environ.get(LAUNCHER_VARIABLE, pid))
        elif environment == "torchrun":
            pid = os.getppid()
        return Owner(host.name(), host.identity(), pid, _born(pid) or 0, launch)

    @property
    def lives(self) -> bool:
        """Whether the process is there, as far as this host can know."""
        return self.machine == host.identity() and self.born > 0 and _born(self.pid) == self.born

    def is_launch_of(self, other: Owner) -> bool:
        """Whether both are of one launch."""
        if self.launch is not None and self.launch == other.launch:
            return True
        return (self.machine, self.pid, self.born) == (other.machine, other.pid, other.born)


class DirectoryLock:
    """The lock of a run directory.

    Args:
        directory: the run directory.
        owner: of this launch.

    Raises:
        RunDirectoryError: if another launch uses the directory, or the file cannot be made.
    """

    def __init__(self, directory: Path, owner: Owner) -> None:
        self._path, self._owner = directory / NAME, owner
        self._file: int | None = None
        deadline = time.monotonic() + _PATIENCE
        try:
            while (other := self._try()) is not None:
                if time.monotonic() > deadline:
                    raise _in_use(directory, other)
                time.sleep(_LOOK)
        except OSError as error:
            raise cannot_write(directory, error) from error

    def _try(self) -> str | None:
        """Take the lock, or find that this launch has it; else return the owner, in words."""
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
            if is_free and os.fstat(file).st_nlink:  # it may have been removed meanwhile
                self._keep(file)
                return None
            return None if not is_free else "a launch that ends"
        finally:
            if self._file != file:
                os.close(file)

    def _keep(self, file: int) -> None:
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(asdict(self._owner)).encode(), 0)
        self._file = file
        _held.add(self)

    def release(self, *, ends: bool) -> None:
        """Give the lock back; where the run does not end, its launcher may start it again."""
        if self._file is None:
            return
        if ends or self._owner.pid == os.getpid():
            with contextlib.suppress(OSError):
                self._path.unlink()
        self.close()

    def close(self) -> None:
        """Close the file; the lock is held until all processes have that share it."""
        if self._file is not None:
            os.close(self._file)
        self._file = None
        _held.discard(self)


def leave(directory: Path) -> None:
    """Let other launches use a directory: the launch of a run there, which was this process's, is over."""
    with contextlib.suppress(OSError):
        file = os.open(directory / NAME, os.O_RDWR | os.O_CLOEXEC)
        try:
            owner = _read(file)
            if owner is not None and owner.pid == os.getpid() and owner.lives and _lock(file):
                (directory / NAME).unlink()
        finally:
            os.close(file)


def in_use(directory: Path, own: Owner | None = None) -> bool | None:
    """Return whether a launch uses a directory; `None` where that cannot be known from here.

    The lock is only tried: a launch that takes it at that moment tries again.

    Args:
        directory: the run directory.
        own: owner of this launch, whose use does not count.
    """
    try:
        file = os.open(directory / NAME, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        owner = _read(file)
        is_own = owner is not None and own is not None and owner.is_launch_of(own)
        if not is_own and not _lock(file, fcntl.LOCK_SH):
            return True
        if owner is None or is_own or owner.lives:
            return owner is not None and not is_own
        return False if owner.machine == host.identity() else None
    except OSError:
        return None
    finally:
        os.close(file)


def status(said: str, used: bool | None) -> str:
    """Return what has become of a run: what its record says, or `dead`: it runs, but without a process.

    A failed run whose launcher lives may be started again: it is still `running`.

    Args:
        said: the status that is recorded.
        used: whether a launch uses the directory, looked at before the record was read.
    """
    if said == "failed" and used:
        return "running"
    return "dead" if said == "running" and used is False else said


_held: weakref.WeakSet[DirectoryLock] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """A forked process may outlive the one that holds the lock."""
    for lock in list(_held):
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


def _read(file: int) -> Owner | None:
    """Return what the file says; nothing where its owner is about to write, or it says something else."""
    try:
        fields = json.loads(os.pread(file, 4096, 0))
        return Owner(
            str(fields["host"]),
            str(fields["machine"]),
            int(fields["pid"]),
            int(fields["born"]),
            fields["launch"],
        )
    except (ValueError, TypeError, KeyError):
        return None


def _born(pid: int) -> int | None:
    """Return when a process was made; `None` if it is gone, or only waits for its parent to look."""
    fields = host.process_fields(pid)
    return None if fields[:1] in ([], ["Z"]) else int(fields[19])


def _in_use(directory: Path, other: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"the run directory {directory} is in use by another launch: {other}; expected one at a time",
        hint="wait for its end, or name another directory with --run-dir",
    )
