"""Forward passes in bf16 or fp16 by autocast; parameters and outputs remain in fp32."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import torch
from torch import nn
from torch.amp.autocast_mode import is_autocast_available

from lockstep.errors import DeviceError

#: The type of autocast for each `precision` other than fp32.
REDUCED = {"bf16": torch.bfloat16, "fp16": torch.float16}


def check_precision(name: str, device: torch.device) -> None:
    """Raise a `DeviceError` if `device` cannot compute matrix products and their gradients in `name`.

    `name`: the run's `precision`, such as "bf16".
    """
    if name not in REDUCED:
        return
    why = _missing(REDUCED[name], device)
    if why is not None:
        others = [other for other in ("bf16", "fp32") if other != name]
        raise DeviceError(
            f"precision={name} on {device.type}: torch {torch.__version__} cannot compute in it there: "
            f"{why}",
            hint=f"precision={' or '.join(others)}",
        )


def _missing(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return the reason why `device` cannot compute under autocast with `dtype`; `None` if it can."""
    if not is_autocast_available(device.type):
        return "it has no autocast"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # torch turns autocast off with a warning
        try:
            matrix = torch.ones(8, 8, device=device, requires_grad=True)
            with torch.autocast(device.type, dtype=dtype):
                product = matrix @ matrix
            product.float().sum().backward()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            return str(error).partition("\n")[0]
    if product.dtype is not dtype:
        return (
            " ".join(str(warning.message) for warning in caught) or f"products are {product.dtype}"
        )
    return None


def autocast_forward(module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Register hooks on `module`: forward passes run under autocast, and their outputs are cast to fp32.

    So the script computes its loss in fp32.
    """
    entered = _EnteredContexts()

    def enter(_module: nn.Module, _inputs: Any) -> None:
        context = torch.autocast(device_type, dtype=dtype)
        context.__enter__()  # type: ignore[no-untyped-call]
        entered.contexts.append(context)

    def leave(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        entered.contexts.pop().__exit__(None, None, None)
        return _to_fp32(output)

    module.register_forward_pre_hook(enter)
    # always_call: if a forward pass raises an exception, autocast must be switched off, too.
    module.register_forward_hook(leave, always_call=True)


class _EnteredContexts(threading.local):
    """The autocast contexts that the current thread has entered, outermost first.

    Threads are kept apart, since `nn.DataParallel` has a thread for each GPU.
    """

    def __init__(self) -> None:
        self.contexts: list[torch.autocast] = []


def _to_fp32(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.is_floating_point() else value
    if isinstance(value, dict):
        return type(value)({key: _to_fp32(item) for key, item in value.items()})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_to_fp32, value))
    if isinstance(value, list | tuple):
        return type(value)(map(_to_fp32, value))
    return value
