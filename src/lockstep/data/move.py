"""Moving a batch of any shape to a device."""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any

import torch


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with every tensor inside lists, tuples and mappings moved to `device`.

    What has a `to` of its own moves itself.

    From pinned memory the copies don't block the host.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, MutableMapping):
        moved = copy.copy(batch)  # keeps what the mapping is besides its items
        moved.update({key: to_device(value, device) for key, value in batch.items()})
        return moved
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
