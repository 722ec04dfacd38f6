"""What only CUDA has: its libraries' choice of algorithms, NVML."""

from __future__ import annotations

import os
from typing import Any

import torch


def make_deterministic() -> None:
    """Choose algorithms of cuBLAS and cuDNN whose results don't vary from call to call."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def nvml() -> Any:
    """Return NVML's bindings, initialized; `None` where they or the driver are missing."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
