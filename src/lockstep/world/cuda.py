"""Functions for CUDA GPUs alone: deterministic algorithms of cuBLAS and cuDNN, NVML, peer access."""

from __future__ import annotations

import os
from typing import Any

import torch


def make_deterministic() -> None:
    """Make cuBLAS and cuDNN use only algorithms whose results don't vary from call to call."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


def nvml() -> Any:
    """Initialize NVML and return its module `pynvml`; `None` if the module or the driver is missing."""
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
    """Return whether `device` is a GPU of CUDA or ROCm."""
    return device.type == "cuda"


def peers(count: int) -> list[list[bool]]:
    """Return a table for `count` GPUs: entry `[a][b]` is whether GPU `a` can access memory of GPU `b`.

    The entries `[a][a]` are false.
    """
    reaches = torch.cuda.can_device_access_peer
    return [[a != b and reaches(a, b) for b in range(count)] for a in range(count)]


def nccl_version() -> str:
    """Return the version of NCCL that this PyTorch was built with."""
    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
