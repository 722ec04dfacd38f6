"""What a rank holds in memory, so that strategies can be compared."""

from __future__ import annotations

import resource
from collections.abc import Iterable
from typing import Any

import torch

from lockstep.strategies.dtensor import bytes_here
from lockstep.training.state import State


def footprint(state: State, device: torch.device) -> dict[str, int]:
    """Return in bytes what this rank has held of the run's models and optimizers, and its peaks of memory.

    Args:
        state: what the run has been told of.
        device: what this rank computes on.

    Returns:
        `parameters`, `buffers`, `gradients` (as they were when an optimizer first stepped) and `optimizer`:
        this rank's own part of each; `peak_host`: the largest resident size of the process so far, all of
        torch in it; `peak_device`: the most that torch has taken of a GPU.
    """
    modules = [model.module for model in state.models]
    used = {
        "parameters": bytes_here(p for module in modules for p in module.parameters()),
        "buffers": bytes_here(b for module in modules for b in module.buffers()),
        "gradients": sum(model.gradient_bytes for model in state.models),
        "optimizer": bytes_here(
            value
            for optimizer in state.optimizers
            for own in optimizer.state.values()
            for value in _tensors(own)
        ),
        # Linux counts in units of 1024 bytes.
        "peak_host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    if device.type == "cuda":
        used["peak_device"] = torch.cuda.max_memory_allocated(device)
    return used


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
