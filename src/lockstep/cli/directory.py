"""Directory for the runs of verbs that start a script many times: kept, or temporary."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import UsageError


@contextlib.contextmanager
def kept_directory(keep: Path | None, verb: str) -> Iterator[Path]:
    """Give a directory for the runs of a verb: `keep`, or a temporary one.

    Raises:
        UsageError: if `keep` exists already.
    """
    if keep is not None:
        if keep.exists():
            raise UsageError(
                f"{keep} exists already; expected a new directory", hint="name another with --keep"
            )
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix=f"lockstep-{verb}-") as directory:
        yield Path(directory)
