"""Synchronization of buffers, such as BatchNorm's running mean: all ranks take the values of replica 0.

A replica is one of the data-parallel workers that a run computes, one or several on each rank. Every
replica starts a step from equal buffers, as with DistributedDataParallel's `broadcast_buffers`. Here the
buffers of all ranks are equal after the step, too, so that evaluation uses the same statistics.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from lockstep.engine.strategies.model_context import Waiting
from lockstep.errors import ModelError


class Buffers:
    """Copies the buffers of one model, such as running means, from replica 0 to all other replicas.

    A replica is one of the data-parallel workers of the run. `block`: the replicas that this rank computes.
    `group`: the ranks to copy to; `None` to copy within this rank only. `modes`: module whose `training`
    flags say whether forward passes change buffers; by default the model itself.
    """

    def __init__(
        self,
        module: nn.Module,
        block: range,
        group: dist.ProcessGroup | None,
        modes: nn.Module | None = None,
        *,
        waiting: Waiting = nullcontext,
    ) -> None:
        self._module = module
        self._waiting = waiting
        self._modes = modes or module
        self._hosts_first = block.start == 0
        self._several = len(block) > 1
        self._group = group
        # Kept, since walking through a model takes longer than a small one's forward pass.
        self._owners = [part._buffers for part in module.modules()]
        self._buffered: list[nn.Module] = []
        self._count = -1
        self._shapes: list[torch.Size] | None = None
        self._versions: list[tuple[int, int]] | None = None
        self._start: list[torch.Tensor] | None = None
        self._first: list[torch.Tensor] | None = None
        self.dirty = False
        self.restores = False  # whether `discard` restores the buffers after the current microbatch
        self._find_parts()

    def _find_parts(self) -> None:
        """Update the list of submodules with buffers, if the number of the model's buffers has changed.

        Pruning, for instance, adds buffers.
        """
        count = sum(map(len, self._owners))
        if count != self._count:
            self._count = count
            self._buffered = [
                part
                for part in self._modes.modules()
                if any(True for _ in part.buffers(recurse=False))
                or getattr(part, "needs_all_ranks", False)
            ]

    @property
    def are_trained(self) -> bool:
        """Whether a forward pass may now change buffers or communicate.

        It may if a submodule with buffers, such as BatchNorm, or one that communicates is in training mode.
        """
        return any(part.training for part in self._buffered)

    def _tensors(self) -> list[torch.Tensor]:
        # Not cached: a module may replace a buffer by another tensor.
        return [buffer.detach() for buffer in self._list()]

    def _list(self) -> list[torch.Tensor]:
        found = [b for own in self._owners if own for b in own.values() if b is not None]
        # A shared buffer once.
        return list({id(buffer): buffer for buffer in found}.values()) if found else found

    # --- a batch ---------------------------------------------------------------------------------

    def record_shapes(self) -> None:
        """Record the shapes of all buffers as a batch begins; `_check_shapes` compares them later."""
        self._find_parts()
        self._shapes = [buffer.shape for buffer in self._list()]

    def end_batch(self) -> None:
        """Forget the shapes that `record_shapes` recorded: until the next batch, shapes may change."""
        self._shapes = None

    def batch_begins(self) -> None:
        """Save a copy of the buffers, from which each replica of this rank starts the batch.

        Nothing is saved if there is a copy already, or if this rank computes a single replica without an
        audit.
        """
        if (self._several or self.restores) and self._start is None:
            self._start = [tensor.clone() for tensor in self._tensors()]

    def before_forward(self) -> None:
        """Save a copy of the buffers before a forward pass that may change them."""
        if self._count and self.are_trained:
            self.batch_begins()
            self.dirty = True

    def next_replica(self) -> None:
        """Reset the buffers to their values at the beginning of the batch, for this rank's next replica.

        On the rank that computes the run's replica 0, a copy of replica 0's buffers is saved first;
        `finish` copies it to all ranks.
        """
        self._check_shapes()
        if not self.dirty or self._start is None:
            return
        if self._hosts_first and self._first is None:
            self._first = [tensor.clone() for tensor in self._tensors()]
        _copy(self._start, self._tensors())

    def discard(self) -> None:
        """Reset the buffers to their values before an audit, a microbatch computed to compare bits."""
        self._check_shapes()
        if self.dirty and self._start is not None:
            _copy(self._start, self._tensors())
        self._start, self.dirty = None, False

    def finish(self) -> None:
        """End the global batch: copy replica 0's buffers to all ranks, if forward passes changed any."""
        if self._shapes is not None:
            self._check_shapes()
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
            with self._waiting():
                broadcast(tensors, self._group)

    # --- changes of buffers that would differ between ranks -----------------------------------------

    def _check_shapes(self) -> None:
        """Raise a `ModelError` if buffers were added, removed or reshaped since `record_shapes`."""
        before = self._shapes
        if before is None or [buffer.shape for buffer in self._list()] == before:
            return
        self._shapes = None
        raise ModelError(
            f"{_difference(self._module, before)} while a batch was computed; expected buffers that stay, "
            "with their shapes, since replica 0's are copied to all",
            hint="create it in __init__ at its largest size; what only saves computing again goes into an "
            "attribute that is no buffer; change buffers between batches, on all ranks alike",
        )

    def before_evaluation(self) -> None:
        """Record the id and `_version` of each buffer, before a forward pass in evaluation mode."""
        self._versions = None if self.are_trained or not self._count else self._identities()

    def after_evaluation(self) -> None:
        """Raise a `ModelError` if the last forward pass in evaluation mode changed any buffer."""
        before, self._versions = self._versions, None
        if before is None or before == (now := self._identities()):
            return
        known = set(before)
        changed = {id(b) for b, own in zip(self._list(), now, strict=True) if own not in known}
        names = [name for name, b in self._module.named_buffers() if id(b) in changed]
        raise ModelError(
            f"a forward pass of {type(self._module).__name__} in evaluation mode changed "
            f"{', '.join(names) or 'its buffers'}; expected it to change none: "
            "each rank would have those of its own samples",
            hint="change buffers in training mode, where replica 0's are copied to all ranks, or between "
            "loops; count and average with run.mean and run.sum",
        )

    def _identities(self) -> list[tuple[int, int]]:
        """Return `(id, _version)` of each buffer, to detect buffers that are modified or replaced."""
        return [(id(b), 0 if b.is_inference() else b._version) for b in self._list()]


def _difference(module: nn.Module, before: list[torch.Size]) -> str:
    """Return text that names the buffers that `module` lost, gained or reshaped.

    `before`: the earlier shapes of its buffers.
    """
    own, name = list(module.named_buffers()), type(module).__name__
    if len(own) < len(before):
        return f"{name} lost {len(before) - len(own)} of its {len(before)} buffers"
    for place, (buffer, tensor) in enumerate(own):
        if len(own) > len(before) and (place >= len(before) or tensor.shape != before[place]):
            return f"{name} got a buffer {buffer}"
        if tensor.shape != before[place]:
            shapes = f"from {tuple(before[place])} to {tuple(tensor.shape)}"
            return f"the buffer {buffer} of {name} changed its shape {shapes}"
    return f"{name} got {len(own) - len(before)} buffers"


def _copy(source: list[torch.Tensor], target: list[torch.Tensor]) -> None:
    if target:
        torch._foreach_copy_(target, source)


def broadcast_model(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Broadcast rank 0's parameters and buffers of `module`, as DistributedDataParallel does."""
    both = [*module.parameters(), *module.buffers()]
    with torch.no_grad():
        broadcast([tensor.detach() for tensor in both], group)


def broadcast(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """Broadcast rank 0's `tensors` to the `tensors` of the other ranks, with one message per device.

    The devices of `tensors` may differ between ranks, but not the number and order of devices.
    """
    for same_device in by_device(tensors):
        parts = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in same_device]
        flat = torch.cat(parts)
        dist.broadcast(flat, group_src=0, group=group)
        if dist.get_rank(group) == 0:
            continue
        received = torch.split(flat, [part.numel() for part in parts])
        # Each part is cloned: bytes in the middle of a buffer may not be aligned for the type.
        values = [
            part.clone().view(tensor.dtype).view(tensor.shape)
            for part, tensor in zip(received, same_device, strict=True)
        ]
        _copy(values, same_device)


def by_device(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Group tensors by device; groups are in the order of each device's first tensor."""
    found: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(tensor.device, []).append(tensor)
    return list(found.values())
