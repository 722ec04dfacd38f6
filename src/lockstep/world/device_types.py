"""Facts about accelerator types that no PyTorch function returns, such as a label for messages.

This module does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceType:
    """A type of accelerator.

    Attributes:
        label: name of the type in messages.
        backend: backend of `torch.distributed` for the type, such as `nccl`.
        visible: environment variable that limits a process to some devices, such as
            `CUDA_VISIBLE_DEVICES`.
    """

    label: str
    backend: str
    visible: str


#: By `torch.device.type`; PyTorch for ROCm calls its devices `cuda`, too.
DEVICE_TYPES = {
    "cuda": DeviceType("NVIDIA GPU", "nccl", "CUDA_VISIBLE_DEVICES"),
    "rocm": DeviceType("AMD GPU", "nccl", "HIP_VISIBLE_DEVICES"),
    "npu": DeviceType("Ascend NPU", "hccl", "ASCEND_RT_VISIBLE_DEVICES"),
    "xpu": DeviceType("Intel GPU", "xccl", "ZE_AFFINITY_MASK"),
}

#: Hides every accelerator from a process.
HIDDEN = {each.visible: "" for each in DEVICE_TYPES.values()}
