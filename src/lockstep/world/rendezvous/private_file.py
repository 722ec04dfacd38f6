"""`open_private`: safely open a file in a directory to which other users may write."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from lockstep.errors import WorldError

_HINT = "name another file, or a directory in which other users cannot write"


def open_private(path: Path) -> int:
    """Open or make a file that only this user can read and write; return its descriptor.

    Raises:
        WorldError: if the path is a link, or a file of another user.
        OSError: if the file cannot be opened.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags, 0o600)
    except IsADirectoryError:
        raise
    except OSError:
        if os.path.lexists(path):  # some kernels deny access to another user's file
            _require_own(path.lstat(), path)
        raise
    try:
        _require_own(os.fstat(descriptor), path)
        os.fchmod(descriptor, 0o600)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _require_own(found: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(found.st_mode):
        what = "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no regular file"
        raise WorldError(f"{path} is {what}; expected a file, or nothing there yet", hint=_HINT)
    if found.st_uid != os.geteuid() and found.st_uid != _owner_in(path.parent):
        raise WorldError(
            f"{path} belongs to the user with id {found.st_uid}; expected a file of this user's "
            f"({os.geteuid()}), or nothing there yet",
            hint=_HINT,
        )


def _owner_in(directory: Path) -> int:
    """Return the user id that owns a new file of this process in `directory`.

    This id may differ from the user id of this process, since a file server may map user ids.
    """
    with tempfile.TemporaryFile(dir=directory) as probe:
        return os.fstat(probe.fileno()).st_uid
