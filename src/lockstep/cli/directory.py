"""Directory for the runs of verbs that start a script many times: kept, or temporary."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lockstep.errors import UsageError


def add_keep(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the flag that keeps the runs of a verb."""
    parser.add_argument("--keep-runs", type=Path, metavar="DIR", help=what)
    # Its name before `lockstep run --keep N` was a flag.
    parser.add_argument("--keep", dest="keep_runs", type=Path, help=argparse.SUPPRESS)


@contextlib.contextmanager
def kept_directory(keep: Path | None, verb: str) -> Iterator[Path]:
    """Give a directory for the runs of a verb: `keep`, or a temporary one.

    Raises:
        UsageError: if `keep` exists already.
    """
    if keep is not None:
        if keep.exists():
            raise UsageError(
                f"{keep} exists already; expected a new directory",
                hint="name another with --keep-runs",
            )
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix=f"lockstep-{verb}-") as directory:
        yield Path(directory)
