"""A terminal of tmux with a shell in it, and what it shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest


class Terminal:
    """A terminal of tmux, with a shell in it; without tmux the test is skipped.

    Args:
        directory: where the shell stands; a socket of tmux comes into it.
        columns: its width.
        lines: its height.
    """

    def __init__(self, directory: Path, columns: int = 100, lines: int = 30) -> None:
        if shutil.which("tmux") is None:
            pytest.skip("needs a terminal: apt-get install tmux")
        self._tmux = ["tmux", "-S", str(directory / "tmux"), "-f", "/dev/null"]
        size = ("-x", str(columns), "-y", str(lines))
        self._do("new-session", "-d", *size, "-c", str(directory), "sh")

    def _do(self, *words: str) -> str:
        env = {**os.environ, "TERM": "xterm-256color", "PS1": "$ ", "ENV": ""}
        done = subprocess.run(
            [*self._tmux, *words], env=env, capture_output=True, text=True, check=True, timeout=10
        )
        return done.stdout

    def keys(self, *keys: str) -> None:
        """Press keys."""
        self._do("send-keys", *keys)

    def type(self, text: str) -> None:
        """Type a line."""
        self._do("send-keys", "-l", text)
        self.keys("Enter")

    @property
    def text(self) -> str:
        """What the terminal shows."""
        return self._do("capture-pane", "-p")

    @property
    def coloured(self) -> str:
        """What the terminal shows, with the codes of its colours."""
        return self._do("capture-pane", "-p", "-e")

    def until(self, pattern: str, seconds: float = 30) -> str:
        """Wait until the terminal shows something; return all of it."""
        deadline = time.monotonic() + seconds
        while not re.search(pattern, text := self.text):
            assert time.monotonic() < deadline, f"no {pattern!r} after {seconds} s in:\n{text}"
            time.sleep(0.05)
        return text

    def close(self) -> None:
        """End it."""
        self._do("kill-server")
