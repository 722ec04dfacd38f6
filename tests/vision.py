"""torchvision for the tests, also beside a torch build for which it has no operators."""

from __future__ import annotations

from typing import Any

import torch


def _define_missing_operators() -> torch.library.Library:
    """Declare the operators whose absence makes `import torchvision` fail; nothing here calls them."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


if not torch.cuda.is_available():
    _library = _define_missing_operators()


def resnet18(**settings: Any) -> Any:
    """Return torchvision's ResNet-18."""
    from torchvision.models import resnet18 as build

    return build(**settings)
