"""Messages of `lockstep submit` on the terminal."""

from __future__ import annotations

import sys
from pathlib import Path


def say(text: str) -> None:
    """Tell the user something, beside the job's output."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the command's own words


def short(path: Path) -> Path:
    """Return `path` from the working directory, where it lies below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
