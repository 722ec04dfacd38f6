"""Fixtures for scripts that are verified."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.adversary.verifying import Verify
from tests.template import Template


@pytest.fixture
def verify(template: Template, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verify:
    """`lockstep verify`, in a temporary directory."""
    return Verify(template, tmp_path, monkeypatch)
