"""A file in a directory that all nodes share: launchers meet in it, and no host is special."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from lockstep.errors import UsageError, WorldError
from lockstep.world import host
from lockstep.world.port_discovery import reason

_INTERVAL = 0.05


class RendezvousFile:
    """The file of one launch, and the lock that tells whether anybody of it is alive.

    Everybody who meets holds a shared lock for as long as it lives, however it ends. Whoever comes and
    gets the lock alone knows that nobody is there, and that the file is a stale one.

    Args:
        directory: the shared directory.
        name: name of the launch.

    Raises:
        UsageError: if the directory is not there, or cannot be used for this.
    """

    def __init__(self, directory: Path, name: str) -> None:
        if not directory.is_dir():
            raise UsageError(
                f"the directory {directory} does not exist on {host.name()}",
                hint="--rdzv-endpoint file:///DIRECTORY needs one that all nodes share",
            )
        self._path = directory / f"lockstep-{name.replace('/', '-')}"
        self._lock_path = self._path.with_name(f"{self._path.name}.lock")
        self._lock = self._open_lock()

    def meet(self, count: int, seconds: float, check: Callable[[], None]) -> tuple[int, dist.Store]:
        """Wait until `count` launchers have come; return this one's number, and the store.

        Raises:
            WorldError: if fewer come within `seconds`, or more than expected have.
        """
        store = self.open()
        index = store.add("arrivals", 1) - 1
        if index >= count:
            raise WorldError(
                f"{count} nodes have met in {self._path} already; expected this one among them",
                hint="another launch meets there: give each an --rdzv-id of its own",
            )
        store.set(f"name/{index}", host.name())
        deadline = time.monotonic() + seconds
        while store.add("arrivals", 0) < count:
            check()
            if time.monotonic() > deadline:
                raise self._missing(store, count, seconds)
            time.sleep(_INTERVAL)
        return index, store

    def open(self) -> dist.Store:
        """Return the store in the file: a fresh one, unless somebody is there."""
        self._take_lock()
        # torch would let all users read it, and with it the secret of the launch.
        os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return dist.FileStore(str(self._path), -1)

    def close(self) -> None:
        """Give up the lock; whoever is the last to leave removes the files."""
        with contextlib.suppress(OSError):  # held by somebody who is still there
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_in_place():  # somebody may have removed the files by hand, and met anew
                self._path.unlink(missing_ok=True)
                self._lock_path.unlink(missing_ok=True)
        os.close(self._lock)

    def _open_lock(self) -> int:
        try:
            return os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise UsageError(f"{self._path.parent} cannot be written: {reason(error)}") from None

    def _take_lock(self) -> None:
        self._try_lock()
        # The launch before may have removed the file of the lock since it was opened here.
        while not self._is_in_place():
            os.close(self._lock)
            self._lock = self._open_lock()
            self._try_lock()

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.fstat(self._lock), self._lock_path.stat())
        except FileNotFoundError:
            return False

    def _try_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass  # somebody is there: the file is theirs, and fresh
        except OSError as error:
            raise UsageError(
                f"{self._path.parent} has no locks: {reason(error)}",
                hint="mount it with locks (flock), or let a host keep the store: --rdzv-endpoint HOST",
            ) from None
        else:
            if self._is_in_place():
                self._path.unlink(missing_ok=True)
        fcntl.flock(self._lock, fcntl.LOCK_SH)

    def _missing(self, store: dist.Store, count: int, seconds: float) -> WorldError:
        came = store.add("arrivals", 0)
        keys = [f"name/{index}" for index in range(came)]
        # One that was killed in between has come, and has no name.
        names = ", ".join(store.get(key).decode() for key in keys if store.check([key]))
        return WorldError(
            f"{count - came} of {count} nodes did not come to {self._path} within {seconds:g} s; "
            f"came: {names}",
            hint="if the others say the same, the directory is not shared between the nodes",
        )
