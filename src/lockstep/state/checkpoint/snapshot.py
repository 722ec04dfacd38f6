"""Snapshots: copies of the run's state in shared memory that outlives the workers.

Each rank of a launcher copies its own parts of sharded tensors, and a share of all other tensors. The
memory has two buffers, which are written in turn: if a rank is killed while it writes one, the other buffer
still has the previous snapshot.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import psutil
import torch

from lockstep.errors import CheckpointError
from lockstep.state.checkpoint.parts import Box, Sharding, StoredTensor, cut_of, local
from lockstep.state.checkpoint.shared_memory import (
    DATA,
    Buffer,
    Descriptors,
    newest,
    next_number,
    run_of,
)
from lockstep.world.cgroups import memory_left

_ALIGNMENT = 64
#: Up to so many bytes are allocated at once; more takes seconds, and is allocated by a thread.
_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class _Extent:
    """Offset, dtype and shape of a tensor in the data of a snapshot buffer."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size

    @property
    def size(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """Offset, dtype and shape of each tensor in a snapshot buffer, and number of bytes of all data."""

    extents: dict[str, _Extent]
    size: int

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor]) -> Layout:
        """Return the memory layout that stores `tensors` one after the other, aligned to 64 bytes."""
        extents, offset = {}, 0
        for name, tensor in tensors.items():
            extents[name] = _Extent(offset, tensor.dtype, tensor.shape)
            offset += -(-extents[name].size // _ALIGNMENT) * _ALIGNMENT
        return Layout(extents, offset)

    def as_json(self) -> list[list[object]]:
        """Return the memory layout as JSON: name, offset, dtype and shape of each tensor."""
        return [
            [name, extent.offset, str(extent.dtype).removeprefix("torch."), list(extent.shape)]
            for name, extent in self.extents.items()
        ]

    @staticmethod
    def parse(content: list[list[object]], size: int) -> Layout:
        """Return the memory layout in `content`, a result of `as_json`, for `size` bytes of data."""
        extents = {}
        for name, offset, dtype, shape in content:
            assert isinstance(offset, int)
            assert isinstance(shape, list)
            extents[str(name)] = _Extent(offset, getattr(torch, str(dtype)), torch.Size(shape))
        return Layout(extents, size)

    def view(self, memory: memoryview, name: str) -> torch.Tensor:
        """Return the tensor `name` as a view of `memory`, the data of a snapshot buffer."""
        extent = self.extents[name]
        if extent.size == 0:
            return torch.empty(extent.shape, dtype=extent.dtype)
        count = extent.shape.numel()
        flat = torch.frombuffer(memory, dtype=extent.dtype, count=count, offset=extent.offset)
        return flat.view(extent.shape)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot in shared memory: the state without its tensors, as text, and the tensors."""

    text: str  # the state besides tensors
    tensors: dict[str, torch.Tensor]  # views of memory that later snapshots overwrite
    ranks: range  # the ranks of this launcher, whose parts of cut tensors the snapshot contains
    size: int  # number of ranks over which tensors are cut
    cuts: dict[str, int]  # dimension of each cut tensor of which other launchers have parts

    @property
    def is_whole(self) -> bool:
        """Whether all elements of the snapshot's tensors are in the memory of this launcher."""
        return not self.cuts

    def stored(self) -> dict[str, StoredTensor]:
        """Return the snapshot's tensors by name; elements are copied when they are read."""
        return {
            name: StoredTensor(tensor.shape, tensor.dtype, partial(self._fetch, name))
            for name, tensor in self.tensors.items()
        }

    def _fetch(self, name: str, box: Box) -> torch.Tensor:
        tensor = self.tensors[name]
        if name in self.cuts:
            dimension = self.cuts[name]
            cut = Sharding(dimension, self.size)
            first, last = (cut.box(tensor.shape, rank) for rank in (self.ranks[0], self.ranks[-1]))
            start, stop = first.offsets[dimension], last.offsets[dimension] + last.sizes[dimension]
            begin = box.offsets[dimension]
            if box.numel and not start <= begin <= begin + box.sizes[dimension] <= stop:
                raise CheckpointError(f"another launcher has a part of {name} in its memory")
        return box.of(tensor).clone()


class Snapshots:
    """Reads and writes the snapshots in shared memory, for one rank.

    The constructor looks for a snapshot from before a restart. So call it before `connect`, after which
    ranks may write new ones.

    Args:
        tag: 32 bytes that identify the run, from `tag_of`.
        part: number of this rank among the ranks of its launcher, from 0.
        parts: number of the launcher's ranks.
        first: rank number of the launcher's first rank.
        size: number of ranks of all launchers; `None` if there is one launcher.
    """

    def __init__(
        self,
        descriptors: Descriptors,
        *,
        tag: bytes,
        part: int,
        parts: int,
        first: int = 0,
        size: int | None = None,
    ) -> None:
        self._descriptors = descriptors
        self._buffers = [Buffer(descriptor) for descriptor in descriptors.buffers]
        self._tag, self._part, self.parts = tag, part, parts
        self._ranks, self._size = range(first, first + parts), parts if size is None else size
        #: Number of the first snapshot after this (re)start.
        self.number = next_number(self._buffers)
        self._layouts: list[Layout | None] = [None, None]
        self._copies: list[list[tuple[str, torch.Tensor, slice | None]]] = [[], []]
        #: The newest snapshot of this run from before the restart; `None` once the run has resumed from it.
        self.found = self.newest()
        left = newest(self._buffers)
        #: Whether the memory has a snapshot of a later run of the same script: a script with several runs
        #: was restarted, begins with its first run, and was interrupted in the later one.
        self.is_of_later_run = left is not None and run_of(left.tag) > run_of(tag)

    def newest(self) -> Snapshot | None:
        """Return the newest complete snapshot; `None` if there is none, or if it belongs to another run."""
        buffer = newest(self._buffers)
        if buffer is None or buffer.tag != self._tag:
            return None
        head = json.loads(buffer.text)
        data = buffer.data
        layout = Layout.parse(head["layout"], len(data))
        tensors = {name: layout.view(data, name) for name in layout.extents}
        first, stop, size = head["ranks"]
        return Snapshot(head["text"], tensors, range(first, stop), size, head["cuts"])

    def forget_after(self, step: int) -> None:
        """Discard this run's snapshots of steps after `step`; each rank calls this before it resumes."""
        for buffer in self._buffers:
            if buffer.number > 0 and buffer.tag == self._tag:
                text = json.loads(json.loads(buffer.text)["text"])
                if text["position"]["counters"]["steps"] > step:
                    buffer.discard()
        self.found = self.newest()

    def is_ready(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether the snapshot buffers are large enough for `tensors`."""
        size = Layout.of(tensors).size
        return all(os.fstat(descriptor).st_size > size for descriptor in self._descriptors.buffers)

    def missing(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int] | None:
        """Return how many more bytes snapshots of `tensors` need, and how many bytes are free.

        Return `None` if snapshots need at most half of the free memory.
        """
        has = sum(os.fstat(descriptor).st_size for descriptor in self._descriptors.buffers)
        layout = Layout.of(tensors)
        cut = sum(layout.extents[name].size for name in self._cuts(tensors))
        # Of cut tensors, the ranks of this launcher copy only their own parts.
        here = layout.size - cut * (self._size - len(self._ranks)) // self._size
        wanted = 2 * here - has
        limit, free = memory_left(), psutil.virtual_memory().available
        free = free if limit is None else min(free, limit)
        return None if wanted <= free // 2 else (wanted, free)

    def prepare(self, text: str, tensors: Mapping[str, torch.Tensor]) -> threading.Thread | None:
        """Allocate memory for snapshots of `text` and `tensors`; return the thread that does so.

        If the amount is small, it is allocated at once without a thread, and the result is `None`.
        """
        layout = Layout.of(tensors)
        # Twice the text: it becomes longer as the numbers in it grow.
        sizes = (2 * len(self._head(text, layout, tensors)), layout.size)
        is_filled = not self._cuts(tensors)

        def take() -> None:
            for buffer, descriptor in zip(self._buffers, self._descriptors.buffers, strict=True):
                buffer.reserve(*sizes)
                # The first write to each page would be slow; the kernel touches pages without the GIL.
                # If other launchers have parts of tensors, the pages of these parts are not touched.
                if is_filled:
                    os.posix_fallocate(descriptor, 0, os.fstat(descriptor).st_size)

        if layout.size <= _AT_ONCE:
            take()
            return None
        thread = threading.Thread(target=take, name="lockstep-memory", daemon=True)
        thread.start()
        return thread

    def _head(self, text: str, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> bytes:
        cuts = {name: cut.dimension for name, cut in self._cuts(tensors).items()}
        ranks = [self._ranks.start, self._ranks.stop, self._size]
        head = {"text": text, "layout": layout.as_json(), "ranks": ranks, "cuts": cuts}
        return json.dumps(head).encode()

    def _cuts(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Sharding]:
        """Return the `Sharding` of tensors that are sharded over several launchers' ranks, by name."""
        if len(self._ranks) == self._size:
            return {}
        return {name: cut for name, tensor in tensors.items() if (cut := cut_of(tensor))}

    def write(self, number: int, text: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write this rank's part of snapshot `number` to shared memory.

        All ranks call this method after the same step. `text` is the state without `tensors`. Nothing is
        written if the snapshot would overwrite the only complete one.
        """
        which = number % 2
        buffer, other = self._buffers[which], self._buffers[1 - which]
        other.refresh()
        buffer.refresh()
        if buffer.number and not other.number:
            return  # the only complete snapshot is not overwritten
        layout = Layout.of(tensors)
        head = self._head(text, layout, tensors)
        buffer.reserve(len(head), layout.size)
        buffer.begin(self._part)
        if self._part == 0:
            buffer.describe(self._tag, head, layout.size, self.parts)
        self._copy(which, layout, buffer, tensors)
        buffer.commit(self._part, number)

    def _copy(
        self, which: int, layout: Layout, buffer: Buffer, tensors: Mapping[str, torch.Tensor]
    ) -> None:
        if self._layouts[which] != layout:
            self._layouts[which] = layout
            data = memoryview(buffer.memory)[DATA : DATA + layout.size]
            self._copies[which] = self._targets(layout, data, tensors)
        targets, sources = [], []
        for name, target, part in self._copies[which]:
            tensor = local(tensors[name])
            targets.append(target)
            sources.append(tensor if part is None else tensor.reshape(-1)[part])
        if targets:
            torch._foreach_copy_(targets, sources)  # without non_blocking: complete when it returns

    def _targets(
        self, layout: Layout, data: memoryview, tensors: Mapping[str, torch.Tensor]
    ) -> list[tuple[str, torch.Tensor, slice | None]]:
        """Return this rank's copies into a snapshot: triples of name, target and slice.

        `tensors`: the state by name. The target is a view of the shared memory `data`, at the place that
        `layout` gives. The slice selects elements of the flattened tensor; `None` means all elements that
        this rank has.
        """
        first = layout.size * self._part // self.parts
        stop = layout.size * (self._part + 1) // self.parts
        copies: list[tuple[str, torch.Tensor, slice | None]] = []
        for name, extent in layout.extents.items():
            target = layout.view(data, name)
            if (cut := cut_of(tensors[name])) is not None:
                rank = self._ranks[self._part]
                if rank < cut.count:
                    box = cut.box(extent.shape, rank)
                    copies.append((name, box.of(target), None))
                continue
            inside = first <= extent.offset < stop
            if not tensors[name].is_contiguous() or extent.size < _AT_ONCE // 64:
                if inside:
                    copies.append((name, target, None))
                continue
            width = extent.dtype.itemsize
            # The elements of this tensor that lie in this rank's share.
            lo = max(0, -(-(first - extent.offset) // width))
            hi = min(extent.shape.numel(), -(-(stop - extent.offset) // width))
            if lo < hi:
                whole = (lo, hi) == (0, extent.shape.numel())
                part = None if whole else slice(lo, hi)
                copies.append((name, target if whole else target.reshape(-1)[lo:hi], part))
        return copies
