"""Every test here may make runs: leave none of their traces behind."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def clean(torch_state: None) -> None:
    """Use the guard in each test."""
