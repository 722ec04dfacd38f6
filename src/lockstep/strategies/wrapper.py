"""DistributedDataParallel that looks like the module it holds."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Replicated(DistributedDataParallel):
    """DistributedDataParallel under the names of the module inside.

    Attributes, parameter names and `state_dict` are the module's own, so that a script reads the
    same on every layout and no checkpoint has keys that begin with `module.`.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the module's own state."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a state into the module."""
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the module's parameters under the module's own names."""
        yield from self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the module's buffers under the module's own names."""
        yield from self.module.named_buffers(*args, **kwargs)


def own_buffers() -> dict[str, Any]:
    """Keep DDP from broadcasting buffers: they are the held model's affair (strategies/buffers.py)."""
    known = inspect.signature(DistributedDataParallel).parameters
    # The newer name; torch 2.13 warns about the older one, which torch 2.11 has alone.
    newer = "forward_sync_buffers"
    return {newer: False} if newer in known else {"broadcast_buffers": False}
