"""Reduced precision inside forward passes: parameters and outputs stay in fp32."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def autocast_forward(module: nn.Module, device_type: str, dtype: torch.dtype) -> None:
    """Run every forward pass of `module` under autocast, and return its outputs in fp32.

    So the loss is computed in fp32, wherever the script computes it.
    """
    entered: list[torch.autocast] = []

    def enter(_module: nn.Module, _inputs: Any) -> None:
        context = torch.autocast(device_type, dtype=dtype)
        context.__enter__()  # type: ignore[no-untyped-call]
        entered.append(context)

    def leave(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        entered.pop().__exit__(None, None, None)
        return _to_fp32(output)

    module.register_forward_pre_hook(enter)
    # Called after a forward pass that raised, too: autocast must not stay on.
    module.register_forward_hook(leave, always_call=True)


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
