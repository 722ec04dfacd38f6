"""Checkpoints in a directory of their own, closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

IDENTITY = {"name": "digits", "seed": 0, "arguments": ["--lr", "0.1"]}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Where checkpoints go."""
    return tmp_path / "checkpoints"


@pytest.fixture
def warned() -> list[str]:
    """What was warned of."""
    return []


@pytest.fixture
def make(directory: Path, warned: list[str]) -> Iterator[Callable[..., Any]]:
    """Make the checkpoints of one rank, or of one among several."""
    made = []

    def make(place: Path = directory, identity: dict[str, Any] | None = None, **more: Any) -> Any:
        from lockstep.state.checkpoint.catalog import Catalog
        from lockstep.state.checkpoint.manager import CheckpointManager

        settings = {"rank": 0, "size": 1, "store": None, "keep": 2, **more}
        catalog = Catalog(place, identity or IDENTITY, warned.append)
        made.append(CheckpointManager(catalog, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()
