"""The command `lockstep`, forked from a process that has imported what these scripts import."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Lockstep
from tests.template import Template


@pytest.fixture(scope="session")
def frameworks() -> Iterator[Template]:
    """The process that commands are forked from."""
    pytest.importorskip("accelerate", reason="needs accelerate, of the extra `accelerate`")
    pytest.importorskip("transformers", reason="needs transformers, of the extra `transformers`")
    process = Template(
        "examples.cpu_torchvision",  # before transformers imports torchvision
        *("transformers.trainer", "transformers.models.gpt2.modeling_gpt2", "sklearn.datasets"),
    )
    yield process
    process.close()


@pytest.fixture
def lockstep(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, frameworks: Template
) -> Iterator[Lockstep]:
    """The command `lockstep`, run in a temporary directory."""
    command = Lockstep(tmp_path, frameworks, tmp_path_factory.mktemp("t"))
    yield command
    command.close()
