"""Atomic writes: after a kill or a power loss a file has its old contents or its new ones, never a mix.

A file is written under a temporary name in the same directory, flushed to disk with `fsync`, and renamed.
Then the directory is flushed, too, since it contains the new name. Without these calls of `fsync`, a file
system may keep the name and lose the contents at a power loss.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

#: Errors of a file system that cannot bring a directory to the disk, or of a directory that cannot be read.
_WITHOUT_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EACCES)


def atomic_write(path: Path, content: str | bytes, mode: int = 0o666, *, sync: bool = True) -> None:
    """Write a file atomically: a reader sees the old contents or the new ones, never a part of them.

    With `sync` the file survives a power loss; without, only a kill of this process. `mode` is the file's
    mode before the process's umask applies. Text is written as UTF-8.

    Raises:
        OSError: if the file cannot be written.
    """
    with replacing(path, mode, sync=sync) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o666, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Context manager: yield a temporary file to write, and rename it to `path` when the context ends.

    If the context raises an error, the temporary file is removed, and `path` is left unchanged. `mode` and
    `sync` are those of `atomic_write`.

    Raises:
        OSError: if the file cannot be written.
    """
    # The name is random and the file is new: where other users may write to the directory, the name cannot
    # be a link to a file of this user's.
    draft = path.parent / f".{path.name}.{secrets.token_hex(8)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(draft, flags, mode), "wb") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        raise
    if sync:
        sync_directory(path.parent)


def sync_file(path: Path) -> None:
    """Flush the contents of a file to disk with `fsync`, also contents that another process has written.

    Raises:
        OSError: if `fsync` fails.
    """
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Flush a directory's entries (names of files) to disk with `fsync`, if the file system supports that.

    Raises:
        OSError: if `fsync` fails.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _WITHOUT_SYNC:
            raise


def make_directory(path: Path, mode: int = 0o777) -> None:
    """Make a directory and its missing parents, so that their names survive a power loss.

    `mode` is the mode of the directory itself; the parents get the default mode.

    Raises:
        OSError: if the directory cannot be made.
    """
    if path.is_dir():
        return
    if not path.parent.exists():
        make_directory(path.parent)
    path.mkdir(mode, exist_ok=True)
    sync_directory(path.parent)
