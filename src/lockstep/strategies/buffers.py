"""Buffers, such as BatchNorm's running statistics: replica 0's updates are the run's.

Every replica starts a step from the same buffers, which is what DistributedDataParallel's
`broadcast_buffers` means; here they also agree after the step, so that evaluation sees the same ones
on every rank.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn


class Buffers:
    """The buffers of one model over the replicas of a rank, and over the ranks.

    Args:
        module: the model.
        block: the replicas of this rank.
        group: the process group, or `None` for a single rank.
    """

    def __init__(self, module: nn.Module, block: range, group: dist.ProcessGroup | None) -> None:
        self._module = module
        self._hosts_first = block.start == 0
        self._several = len(block) > 1
        self._group = group
        self._has_buffers = any(True for _ in module.buffers())
        self._start: list[torch.Tensor] | None = None
        self._first: list[torch.Tensor] | None = None
        self.dirty = False
        #: Entered while ranks wait for each other here.
        self.meeting: AbstractContextManager[None] = nullcontext()

    def _tensors(self) -> list[torch.Tensor]:
        # Asked for anew each time: a module may replace a buffer by another tensor.
        return [buffer.detach() for buffer in self._module.buffers()]

    def batch_begins(self) -> None:
        """Remember what all replicas of this rank start from."""
        if self._several and self._start is None:
            self._start = [tensor.clone() for tensor in self._tensors()]

    def before_forward(self) -> None:
        """A forward pass in training mode is about to change the buffers."""
        if not self._has_buffers:
            return
        self.batch_begins()
        self.dirty = True

    def next_replica(self) -> None:
        """A replica of this rank is done; the next one starts from the same buffers."""
        if not self.dirty or self._start is None:
            return
        if self._hosts_first and self._first is None:
            self._first = [tensor.clone() for tensor in self._tensors()]
        _copy(self._start, self._tensors())

    def finish(self) -> None:
        """The global batch is done: all ranks take replica 0's buffers."""
        if not self.dirty:
            self._start = None
            return
        self.dirty = False
        if not self._several and self._group is None:
            return
        tensors = self._tensors()
        if self._first is not None:
            _copy(self._first, tensors)
        self._start = self._first = None
        if self._group is not None:
            with self.meeting:
                broadcast(tensors, self._group)


def _copy(source: list[torch.Tensor], target: list[torch.Tensor]) -> None:
    if target:
        torch._foreach_copy_(target, source)


def broadcast(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Send rank 0's tensors to all, as bytes and in one message for each device that they are on.

    A module may span several devices, which are others on every rank; in their order they are the same.
    """
    for together in by_device(tensors):
        _broadcast(together, group)


def by_device(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Return tensors that are on one device together, in the order in which devices come first."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return list(found.values())


def _broadcast(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    flat = torch.cat(parts)
    dist.broadcast(flat, group_src=0, group=group)
    if dist.get_rank(group) == 0:
        return
    received = torch.split(flat, [part.numel() for part in parts])
    _copy(
        [
            # A copy of its own: bytes in the middle of others may not be aligned for the type.
            part.clone().view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(received, tensors, strict=True)
        ],
        tensors,
    )
