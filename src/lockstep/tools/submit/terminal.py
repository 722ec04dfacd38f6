"""Messages of `lockstep submit` on the terminal."""

from __future__ import annotations

import sys


def say(text: str) -> None:
    """Tell the user something, beside the job's output."""
    print(text, file=sys.stderr, flush=True)  # noqa: T201 - the command's own words
