"""torchvision for the tests, also beside a torch without CUDA, which has no operators for it."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

runpy.run_path(str(Path(__file__).parents[1] / "examples/cpu_torchvision.py"))


def resnet18(**settings: Any) -> Any:
    """Return torchvision's ResNet-18."""
    from torchvision.models import resnet18 as build

    return build(**settings)
