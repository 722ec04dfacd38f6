"""A file system that answers nobody: processes that write to it cannot be ended, not by SIGKILL either."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def frozen_disk(directory: Path) -> Iterator[Path]:
    """Mount a disk in `directory`, and freeze it while the body runs; skip the test where nobody may."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    image, place = directory / "image", directory / "frozen"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    for words in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, place]):
        if problem := _problem(*map(str, words)):
            pytest.skip(problem)
    try:
        assert not _problem("fsfreeze", "--freeze", str(place))
        try:
            yield place
        finally:
            assert not _problem("fsfreeze", "--unfreeze", str(place))
    finally:
        # A process that could not be ended ends now; until then the file system is in use.
        assert not _problem("umount", "--lazy", str(place))


def _problem(*words: str) -> str:
    """Run a program; return what it says if it fails."""
    path = f"{os.environ['PATH']}:/sbin:/usr/sbin"
    try:
        done = subprocess.run(
            words, env={**os.environ, "PATH": path}, check=False, capture_output=True, text=True
        )
    except FileNotFoundError as error:
        return str(error)
    return f"{words[0]}: {done.stderr.strip()}" if done.returncode else ""
