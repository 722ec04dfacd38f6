"""A simulated accelerator: device type `sim`, collective backend `simccl`.

An entry point lets `import torch` load it. Variables: SIM_DEVICES (default 4), SIM_VISIBLE_DEVICES,
SIM_MEMORY (bytes of a device), SIM_LAZY (1: a stream runs when something waits for it). Faults: SIM_BROKEN
(a device whose kernels fail), SIM_SEEDS=0 (generators without seeds), SIM_IDS=0 (devices without ids).
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import time
import types
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist

_NAME = "Simulated accelerator"

# Autograd starts a thread for each device at the first backward pass. A thread that asks for the GIL after
# the interpreter's end aborts the process. At exit a CPU build of torch makes all of them ask; builds for
# CUDA leave them alone.
os.environ.setdefault("TORCH_AUTOGRAD_SHUTDOWN_WAIT_LIMIT", "0")
atexit.register(lambda: _c.is_used() and time.sleep(0.1))


def _load() -> Any:
    file = Path(__file__).with_name("simulated_device_c.so")
    spec = importlib.util.spec_from_file_location("simulated_device_c", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_c = _load()
torch.utils.rename_privateuse1_backend("sim")


def _cpu_kernels() -> list[str]:
    """Return operators with a kernel of the CPU beside a composite one, which would be chosen."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")]
    return [
        name.removeprefix("aten::")
        for name in names
        if has(name, "CPU")
        and has(name, "CompositeExplicitAutograd")
        and not has(name, "PrivateUse1")
    ]


_c.use_cpu_kernels(_cpu_kernels())


def _index(device: Any = None) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


class _Device:
    """`torch.sim.device`: a context in which a device is the current one."""

    def __init__(self, device: Any) -> None:
        self._index = _index(device)

    def __enter__(self) -> None:
        self._before = torch.accelerator.current_device_index()
        torch.accelerator.set_device_index(self._index)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_device_index(self._before)


class _StreamContext:
    """`torch.sim.stream`: a context in which a stream is the current one."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self._stream = stream

    def __enter__(self) -> torch.Stream | None:
        if self._stream is not None:
            self._before = torch.accelerator.current_stream(self._stream.device)
            torch.accelerator.set_stream(self._stream)
        return self._stream

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            torch.accelerator.set_stream(self._before)


class _Stream(torch.Stream):
    def __new__(cls, device: Any = None, priority: int = 0, **more: Any) -> Self:
        return super().__new__(
            cls, device=torch.device("sim", _index(device)), priority=priority, **more
        )


class _Event(torch.Event):
    def __new__(cls, enable_timing: bool = False, **_: Any) -> Self:
        return super().__new__(cls, device="sim", enable_timing=enable_timing)


def _generators() -> list[torch.Generator]:
    return [_c.generator(index) for index in range(_c.device_count())]


def _manual_seed_all(seed: int) -> None:
    for generator in _generators():
        generator.manual_seed(seed)


def _set_rng_state_all(states: list[torch.Tensor]) -> None:
    for generator, state in zip(_generators(), states, strict=True):
        generator.set_state(state)


def _id(index: int) -> str:
    shown = os.environ.get("SIM_VISIBLE_DEVICES", "").split(",")
    return f"{os.uname().nodename}-{shown[index] if index < len(shown) and shown[index] else index}"


def _properties(device: Any = None) -> types.SimpleNamespace:
    found = types.SimpleNamespace(name=_NAME, total_memory=_c.memory_limit())
    if os.environ.get("SIM_IDS") != "0":
        found.uuid = _id(_index(device))
    return found


def _module() -> types.ModuleType:
    """Return `torch.sim`, as PyTorch asks of a device's module."""
    torch_accelerator = torch.accelerator
    module = types.ModuleType("torch.sim")
    module.__dict__.update(
        device=_Device,
        device_count=_c.device_count,
        _device_count=_c.device_count,
        is_available=lambda: _c.device_count() > 0,
        is_initialized=_c.is_used,
        init=_c.use,
        _lazy_init=_c.use,
        _is_in_bad_fork=_c.is_forked,
        _get_device_index=_index,
        current_device=torch_accelerator.current_device_index,
        set_device=lambda device: torch_accelerator.set_device_index(_index(device)),
        synchronize=lambda device=None: torch_accelerator.synchronize(_index(device)),
        current_stream=lambda device=None: torch_accelerator.current_stream(_index(device)),
        default_stream=lambda device=None: torch.Stream(
            stream_id=0, device_index=_index(device), device_type=20
        ),
        set_stream=torch_accelerator.set_stream,
        stream=_StreamContext,
        StreamContext=_StreamContext,
        Stream=_Stream,
        Event=_Event,
        manual_seed=lambda seed: _c.generator(_index()).manual_seed(seed),
        manual_seed_all=_manual_seed_all,
        initial_seed=lambda: _c.generator(_index()).initial_seed(),
        get_rng_state=lambda device="sim": _c.generator(_index(device)).get_state(),
        set_rng_state=lambda state, device="sim": _c.generator(_index(device)).set_state(state),
        get_rng_state_all=lambda: [generator.get_state() for generator in _generators()],
        set_rng_state_all=_set_rng_state_all,
        get_amp_supported_dtype=lambda: [torch.float16, torch.bfloat16],
        is_bf16_supported=lambda *_: True,
        memory_allocated=torch_accelerator.memory_allocated,
        max_memory_allocated=torch_accelerator.max_memory_allocated,
        memory_reserved=torch_accelerator.memory_reserved,
        max_memory_reserved=torch_accelerator.max_memory_reserved,
        reset_peak_memory_stats=torch_accelerator.reset_peak_memory_stats,
        memory_stats=torch_accelerator.memory_stats,
        mem_get_info=torch_accelerator.get_memory_info,
        empty_cache=torch_accelerator.empty_cache,
        get_device_name=lambda _=None: _NAME,
        get_device_properties=_properties,
    )
    return module


torch._register_device_module("sim", _module())
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
calls, set_lazy = _c.calls, _c.set_lazy


def _communicator(store: dist.Store, rank: int, size: int, timeout: Any) -> dist.Backend:
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    store.set(f"device {rank}", _id(torch.accelerator.current_device_index()))
    ids = [store.get(f"device {each}") for each in range(size)]
    if len(set(ids)) < size:  # NCCL refuses this on all ranks, too
        raise dist.DistBackendError(f"simccl error: Duplicate device detected: {ids}")
    return _c.communicator(gloo)


dist.Backend.register_backend("simccl", _communicator, devices=["sim"])


def load() -> None:
    """Do nothing: importing this module has registered the device (`torch.backends` calls this)."""
