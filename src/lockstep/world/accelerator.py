"""The accelerator of this process, by `torch.accelerator` and the module of its device type.

Other modules ask here and name no device type; `cuda.py` has what only CUDA has.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from lockstep.world.device_types import DEVICE_TYPES, DeviceType


@functools.cache
def kind() -> str | None:
    """Return the device type that this torch has an accelerator for (`cuda`, `npu`, …), if any.

    A CUDA build returns `cuda` also on a machine without a GPU.
    """
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


@functools.cache
def module() -> Any:
    """Return the device type's module (`torch.cuda`, `torch.npu`, …); `None` without an accelerator."""
    own = kind()
    return None if own is None else torch.get_device_module(own)


def facts() -> DeviceType:
    """Return what `DEVICE_TYPES` has about the accelerator, or what PyTorch's conventions say."""
    own = kind() or "cuda"
    if own == "cuda" and torch.version.hip:
        own = "rocm"
    if own in DEVICE_TYPES:
        return DEVICE_TYPES[own]
    backend = dist.Backend.default_device_backend_map.get(own, "")
    return DeviceType(own, backend, f"{own.upper()}_VISIBLE_DEVICES")


def count() -> int:
    """Return the number of devices that this process sees."""
    own = module()
    return 0 if own is None else int(own.device_count())


def is_initialized() -> bool:
    """Whether this process has used a device: then it cannot be forked."""
    own = module()
    return own is not None and bool(own.is_initialized())


def holds(value: torch.Tensor | torch.device) -> bool:
    """Whether a device is an accelerator, or a tensor is on one."""
    device = value.device if isinstance(value, torch.Tensor) else value
    return device.type == kind()


def use(index: int) -> torch.device:
    """Make a device the current one and return it."""
    own = kind()
    assert own is not None, "an index was found"
    module().set_device(index)
    return torch.device(own, index)


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Move a module to a device, and keep its `Parameter` objects: optimizers may have them already.

    `Module.to` makes new ones for a device of `PrivateUse1`, unless torch.__future__ says to swap memory.
    """
    future, there = torch.__future__, torch.empty(0, device=device)
    swaps = future.get_swap_module_params_on_conversion()
    kept = all(torch._has_compatible_shallow_copy_type(p, there) for p in module.parameters())
    future.set_swap_module_params_on_conversion(swaps or not kept)
    try:
        module.to(device)
    finally:
        future.set_swap_module_params_on_conversion(swaps)


def current_index(device: torch.device) -> int:
    """Return the index of a device; the current one's where `device` has none."""
    return int(module().current_device()) if device.index is None else device.index


def name(device: torch.device) -> str | None:
    """Return the model of an accelerator; `None` for the processor."""
    return str(module().get_device_name(device)) if holds(device) else None


def uuid(index: int) -> str | None:
    """Return the id of a device, where its module knows one."""
    found = getattr(module().get_device_properties(index), "uuid", None)
    return None if found is None else str(found)


def peak_memory(device: torch.device) -> int | None:
    """Return the most bytes that tensors had on an accelerator; `None` for the processor."""
    return int(module().max_memory_allocated(device)) if holds(device) else None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that an accelerator's memory is used up."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    # Some backends raise a plain RuntimeError.
    return isinstance(error, RuntimeError) and "out of memory" in str(error).lower()


def memory_use(device: torch.device) -> str:
    """Return the peaks of allocated and reserved memory of an accelerator, and the size of its memory."""
    own = module()
    peaks = own.max_memory_allocated(device), own.max_memory_reserved(device)
    allocated, reserved, limit = (
        f"{size / 2**10:,.1f} KiB" if size < 2**20 else f"{size / 2**20:,.1f} MiB"
        for size in (*peaks, own.mem_get_info(device)[1])
    )
    return f"at most {allocated} allocated and {reserved} reserved; the device has {limit}"


def reserved_memory(device: torch.device) -> int | None:
    """Return the bytes that PyTorch's allocator has on an accelerator; `None` for the processor."""
    return int(module().memory_reserved(device)) if holds(device) else None


def backends(device: torch.device) -> str:
    """Return the backends of a process group: Gloo, and the accelerator's for its tensors."""
    return f"cpu:gloo,{device.type}:{facts().backend}" if holds(device) else "gloo"


class SideStream:
    """A stream of the accelerator beside the current one; tensors of the processor need none."""

    def __init__(self) -> None:
        self._stream: torch.Stream | None = None

    @contextlib.contextmanager
    def after(self, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
        """Run the block's kernels on this stream, after those that the current stream already has.

        Args:
            inputs: tensors, made on the current stream, that the kernels read.
        """
        if not holds(inputs[0]):
            yield
            return
        device = inputs[0].device
        self._stream = self._stream or torch.Stream(device=device)
        self._stream.wait_stream(torch.accelerator.current_stream(device))
        for each in inputs:
            each.record_stream(self._stream)
        with self._stream:
            yield
