"""The simulated accelerator, built once for this torch; without a compiler its tests are skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.device.simulated import build

CACHE = Path(__file__).parents[2] / "build" / "device"


@pytest.fixture(scope="session")
def simulated() -> str:
    """Return the directory that goes on PYTHONPATH."""
    if lacks := build.missing():
        pytest.skip(f"the simulated accelerator cannot be built: {lacks}")
    environ = {**os.environ, "MAX_JOBS": "2"}
    words = [sys.executable, build.__file__, str(CACHE)]
    done = subprocess.run(
        words, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]
