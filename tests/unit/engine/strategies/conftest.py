"""Every test here draws random numbers or sets threads: leave none of it behind."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def clean(torch_state: None) -> None:
    """Use the guard in each test."""
