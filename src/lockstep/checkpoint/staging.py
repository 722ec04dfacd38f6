"""Which rank writes which tensors, and memory to copy them into while training goes on."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor

from lockstep.checkpoint.dcp import bytes_of, dtype_of, spec_of
from lockstep.checkpoint.manifest import TensorSpec
from lockstep.checkpoint.parts import Box, Cut


def share_out(
    specs: Mapping[str, TensorSpec], writers: int, cuts: Mapping[str, Cut] | None = None
) -> list[dict[str, Box]]:
    """Return what each writer writes: nearly equal in bytes, and the same on every rank.

    Of a tensor that is cut over ranks each writes its own part, as writer `k` is rank `k`. Of the others
    the largest come first, each to the writer that has least; names are in the order of `specs`.
    """
    cuts = cuts or {}
    loads = [(0, writer) for writer in range(writers)]
    owner: dict[str, int] = {}
    for name in sorted(specs.keys() - cuts.keys(), key=lambda n: (-bytes_of(specs[n]), n)):
        load, writer = heapq.heappop(loads)
        owner[name] = writer
        # Even an empty tensor is some work.
        heapq.heappush(loads, (load + bytes_of(specs[name]) + 1, writer))
    shares: list[dict[str, Box]] = [{} for _ in range(writers)]
    for name, spec in specs.items():
        if name not in cuts:
            shares[owner[name]][name] = Box.whole(spec.shape)
            continue
        for part in range(cuts[name].count):
            box = cuts[name].box(spec.shape, part)
            if box.numel:
                shares[part][name] = box
    return shares


class Buffers:
    """Memory on the host that serves every checkpoint anew: new pages cost far more than to fill them."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def prepare(self, specs: Mapping[str, TensorSpec], pinned: Collection[str] = ()) -> None:
        """Get the memory, and touch every page of it; may run in a thread of its own.

        Args:
            specs: types and shapes of what will be copied.
            pinned: names of those that come from a GPU.
        """
        for name in [name for name in self._kept if name not in specs]:
            del self._kept[name]
        for name, spec in specs.items():
            kept = self._kept.get(name)
            if kept is None or spec_of(kept) != spec:
                self._kept[name] = _touched(spec, pin=name in pinned)

    def copy(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
        """Copy tensors, with their names, into the memory that `prepare` has got, one after the other.

        Returns:
            The copies, which are valid until the next call.
        """
        devices = set()
        with torch.no_grad():
            for name, tensor in tensors:
                self._kept[name].copy_(tensor, non_blocking=tensor.is_cuda)
                if tensor.is_cuda:
                    devices.add(tensor.device)
        for device in devices:
            torch.cuda.synchronize(device)
        return dict(self._kept)


def _touched(spec: TensorSpec, *, pin: bool) -> Tensor:
    count = bytes_of(spec)
    memory = torch.empty(count, dtype=torch.uint8, pin_memory=pin)
    # By numpy, not by torch: a thread that computes with torch would start a team of threads of its own.
    memory.numpy().fill(0)
    return memory.view(dtype_of(spec)).view(spec.shape)
