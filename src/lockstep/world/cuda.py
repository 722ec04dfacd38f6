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


def holds(device: torch.device) -> bool:
    """Whether a device is a GPU of CUDA or ROCm."""
    return device.type == "cuda"


def peers(count: int) -> list[list[bool]]:
    """Return, for each pair of GPUs, whether the first reaches the memory of the second."""
    reaches = torch.cuda.can_device_access_peer
    return [[a != b and reaches(a, b) for b in range(count)] for a in range(count)]


def nccl_version() -> str:
    """Return the version of NCCL that this PyTorch was built with."""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
