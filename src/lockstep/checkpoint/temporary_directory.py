"""Checkpoints that are being written: drafts, and how to tell which of them nobody writes any more.

Whoever writes drafts holds a lock on a file of its own, which the kernel lets go of when the process
ends, however it ends. A draft carries the name of that file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from pathlib import Path

from lockstep.checkpoint.manifest import DIRECTORY_MODE, FILE_MODE

_LOCK = ".writer-"
_DRAFT = ".draft-"


class Token:
    """A name that drafts carry, with a lock that says that somebody writes them.

    Args:
        directory: where checkpoints are; it is made if need be.

    Raises:
        OSError: if nothing can be written there.
    """

    def __init__(self, directory: Path) -> None:
        directory.mkdir(mode=DIRECTORY_MODE, parents=True, exist_ok=True)
        while True:
            self.name = secrets.token_hex(8)
            self.path = lock_file(directory, self.name)
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, FILE_MODE)
            # Some file systems have no locks; then nobody removes these drafts but the run itself.
            with contextlib.suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            if self._is_there():
                return
            os.close(self._descriptor)

    def _is_there(self) -> bool:
        # Another launch may have taken the file for a dead one's, just before it was locked.
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self._descriptor))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Remove the drafts, let go of the lock, and remove the file."""
        remove_drafts(self.path.parent, self.name)
        with contextlib.suppress(OSError):
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)


def lock_file(directory: Path, token: str) -> Path:
    """Return the file that says that somebody writes the drafts of `token`."""
    return directory / f"{_LOCK}{token}"


def is_held(directory: Path, token: str) -> bool:
    """Return whether whoever writes the drafts of `token` may still be at it."""
    try:
        descriptor = os.open(lock_file(directory, token), os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held; or the file system has no locks
        return True
    finally:
        os.close(descriptor)
    return False


def draft(directory: Path, token: str, serial: int, step: int) -> Path:
    """Return where the `serial`-th checkpoint of a writer is written, that of `step`."""
    return directory / f"{_DRAFT}{token}-{serial}-{step}"


def remove(path: Path) -> None:
    """Remove a directory and what is in it, as far as that is possible."""
    shutil.rmtree(path, ignore_errors=True)


def remove_drafts(directory: Path, token: str) -> None:
    """Remove all drafts of `token`; no rank writes one in this moment."""
    for path in directory.glob(f"{_DRAFT}{token}-*"):
        remove(path)


def remove_dead(directory: Path, own: str) -> None:
    """Remove the drafts that no living process writes.

    Args:
        directory: where they are.
        own: the token of whoever asks: its drafts are left alone.
    """
    # A writer makes its lock first and drafts later: looking for drafts first never finds one whose lock
    # is still to come.
    left = list(directory.glob(f"{_DRAFT}*"))
    tokens = {path.name.removeprefix(_LOCK): path for path in directory.glob(f"{_LOCK}*")}
    alive = {token for token, path in tokens.items() if token == own or not _end(path)}
    for path in left:
        if path.name.removeprefix(_DRAFT).split("-")[0] not in alive:
            remove(path)


def _end(path: Path) -> bool:
    """Remove the file of a writer that is dead; return whether it is."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # While the lock is held: a writer that waits for it will see that its file has gone.
        path.unlink(missing_ok=True)
    except OSError:  # held by somebody; or the file system has no locks
        return False
    finally:
        os.close(descriptor)
    return True
