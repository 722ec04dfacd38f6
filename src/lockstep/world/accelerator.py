"""Functions for the accelerator of this process, whether GPU, NPU or another type that PyTorch supports.

They use `torch.accelerator` and the module of the device type, such as `torch.cuda`, so that no other
module depends on a device type. Functions that exist only for CUDA are in `cuda.py`.
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
    """Return the accelerator type that the installed PyTorch supports (`cuda`, `npu`, …); else `None`.

    With PyTorch for CUDA the result is `cuda` even on a machine without a GPU.
    """
    found = torch.accelerator.current_accelerator()
    return None if found is None else found.type


@functools.cache
def module() -> Any:
    """Return PyTorch's module for the accelerator (`torch.cuda`, `torch.npu`, …); `None` without one."""
    own = kind()
    return None if own is None else torch.get_device_module(own)


def facts() -> DeviceType:
    """Return label, backend and device variable of this process's accelerator, as a `DeviceType`.

    If `DEVICE_TYPES` does not list the accelerator's type, these are derived from PyTorch and the type's
    name.
    """
    own = kind() or "cuda"
    if own == "cuda" and torch.version.hip:
        own = "rocm"
    if own in DEVICE_TYPES:
        return DEVICE_TYPES[own]
    backend = dist.Backend.default_device_backend_map.get(own, "")
    return DeviceType(own, backend, f"{own.upper()}_VISIBLE_DEVICES")


def count() -> int:
    """Return the number of accelerators that this process can use, 0 without any."""
    own = module()
    return 0 if own is None else int(own.device_count())


def is_initialized() -> bool:
    """Whether this process has initialized the accelerator's driver, after which it must not fork."""
    own = module()
    return own is not None and bool(own.is_initialized())


def holds(value: torch.Tensor | torch.device) -> bool:
    """Return whether a device, or the device of a tensor, is an accelerator."""
    device = value.device if isinstance(value, torch.Tensor) else value
    return device.type == kind()


def use(index: int) -> torch.device:
    """Make the accelerator number `index` the current device, and return it."""
    own = kind()
    assert own is not None, "an index was found"
    module().set_device(index)
    return torch.device(own, index)


def move(module: torch.nn.Module, device: torch.device) -> None:
    """Move `module` to `device` in place, and keep its `Parameter` objects, which optimizers may hold.

    For a device type outside of PyTorch (`PrivateUse1`), `Module.to` would replace these objects. A switch
    in `torch.__future__`, set during this call, makes `Module.to` swap their memory instead.
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
    """Return `device.index`, or the index of the current accelerator if `device` has no index."""
    return int(module().current_device()) if device.index is None else device.index


def name(device: torch.device) -> str | None:
    """Return the model name of an accelerator; `None` for the CPU."""
    return str(module().get_device_name(device)) if holds(device) else None


def uuid(index: int) -> str | None:
    """Return the UUID of accelerator number `index`; `None` if PyTorch does not report one."""
    found = getattr(module().get_device_properties(index), "uuid", None)
    return None if found is None else str(found)


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory of tensors on an accelerator, in bytes; `None` for the CPU."""
    return int(module().max_memory_allocated(device)) if holds(device) else None


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error says that an accelerator's memory is used up."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    # Some backends raise a plain RuntimeError.
    return isinstance(error, RuntimeError) and "out of memory" in str(error).lower()


def memory_use(device: torch.device) -> str:
    """Return a text with an accelerator's peaks of allocated and reserved memory, and its memory size."""
    own = module()
    peaks = own.max_memory_allocated(device), own.max_memory_reserved(device)
    allocated, reserved, limit = (
        f"{size / 2**10:,.1f} KiB" if size < 2**20 else f"{size / 2**20:,.1f} MiB"
        for size in (*peaks, own.mem_get_info(device)[1])
    )
    return f"at most {allocated} allocated and {reserved} reserved; the device has {limit}"


def reserved_memory(device: torch.device) -> int | None:
    """Return the bytes that PyTorch's allocator has reserved on an accelerator; `None` for the CPU."""
    return int(module().memory_reserved(device)) if holds(device) else None


class SideStream:
    """A second stream of the accelerator, whose kernels may overlap later kernels of the current stream."""

    def __init__(self) -> None:
        self._stream: torch.Stream | None = None

    @contextlib.contextmanager
    def after(self, inputs: Sequence[torch.Tensor]) -> Iterator[None]:
        """Context manager: kernels launched in its body run on this stream.

        They start after the kernels that were launched on the current stream before. If `inputs` are on
        the CPU, the context manager does nothing.

        Args:
            inputs: tensors, computed on the current stream, that the kernels read.
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
