"""`lockstep verify` in the process of the test, with launches that are forked: they have imported torch."""

from __future__ import annotations

import os
import subprocess
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from lockstep.launch import command
from lockstep.tools.verify import comparison, layouts, running
from tests.template import Forked, Template

#: For scripts that need what stands beside the tests (`tests.vision`).
ROOT = Path(__file__).parents[2]
#: A launch that takes longer is killed.
_SECONDS = 120


class _Launch(Forked):
    """A launch that ends in time."""

    def wait(self, timeout: float | None = None) -> int:
        return super().wait(_SECONDS if timeout is None else timeout)


class Verify:
    """Verifies scripts in a directory of its own.

    Args:
        template: the process that launches are forked from.
        directory: in which scripts run.
        monkeypatch: puts such launches in the place of interpreters of their own.
    """

    def __init__(
        self, template: Template, directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self._template, self.directory = template, directory
        monkeypatch.setattr(
            command,
            "subprocess",
            types.SimpleNamespace(Popen=self._start, DEVNULL=subprocess.DEVNULL),
        )

    def __call__(
        self, script: Path, words: Sequence[str], arguments: Sequence[str] = ()
    ) -> comparison.VerifyResult:
        """Return what comes of a script with `arguments` on the layouts `words`."""
        parsed = layouts.parse(words)
        replicas = max(layout.ranks for layout in parsed)
        work = running.RunSpec(command.RunCommand([str(script), *arguments], (), ()), replicas)
        outcomes = running.outcomes(parsed, work, self.directory / "verified")
        return comparison.judge(list(outcomes))

    def _start(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        **streams: IO[bytes],
    ) -> Forked:
        del streams["stdin"]  # none, for what is forked
        beside: dict[str, Any] = {**env, "PYTHONPATH": os.fspath(ROOT)}
        return _Launch(self._template, words[3:], cwd or self.directory, beside, **streams)
