"""Snapshots: copies of the run's state in shared memory that outlives the workers.

Of what all ranks of a launcher hold each copies a share, and of what is cut over them its own part. A rank
that is killed in the middle leaves that half of the memory without its mark; the other half still holds
the snapshot before.
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
from lockstep.state.checkpoint.parts import Box, Cut, Stored, cut_of, local
from lockstep.state.checkpoint.shared_memory import (
    DATA,
    Buffer,
    Descriptors,
    newest,
    next_number,
    run_of,
)
from lockstep.world import accelerator
from lockstep.world.cgroups import memory_left

_ALIGNMENT = 64
#: Memory that is taken at once; more takes seconds, and is taken beside the training.
_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor lies in the data of a buffer."""

    offset: int
    dtype: torch.dtype
    shape: torch.Size

    @property
    def size(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Layout:
    """Where tensors lie in the data of a buffer.

    Attributes:
        places: by name.
        size: bytes in all.
    """

    places: dict[str, _Place]
    size: int

    @staticmethod
    def of(tensors: Mapping[str, torch.Tensor]) -> Layout:
        """Return the layout of `tensors`, in their order."""
        places, offset = {}, 0
        for name, tensor in tensors.items():
            places[name] = _Place(offset, tensor.dtype, tensor.shape)
            offset += -(-places[name].size // _ALIGNMENT) * _ALIGNMENT
        return Layout(places, offset)

    def as_json(self) -> list[list[object]]:
        """Return it as JSON has it."""
        return [
            [name, place.offset, str(place.dtype).removeprefix("torch."), list(place.shape)]
            for name, place in self.places.items()
        ]

    @staticmethod
    def parse(told: list[list[object]], size: int) -> Layout:
        """Read what `as_json` has made."""
        places = {}
        for name, offset, dtype, shape in told:
            assert isinstance(offset, int)
            assert isinstance(shape, list)
            places[str(name)] = _Place(offset, getattr(torch, str(dtype)), torch.Size(shape))
        return Layout(places, size)

    def view(self, memory: memoryview, name: str) -> torch.Tensor:
        """Return the tensor of that name in `memory`."""
        place = self.places[name]
        if place.size == 0:
            return torch.empty(place.shape, dtype=place.dtype)
        flat = torch.frombuffer(
            memory, dtype=place.dtype, count=place.shape.numel(), offset=place.offset
        )
        return flat.view(place.shape)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A snapshot as it lies in memory.

    Attributes:
        text: what it says besides tensors.
        tensors: by name; views of the memory, which the next snapshots overwrite.
        ranks: whose parts of the tensors that are cut over ranks are in it.
        size: number of ranks that had parts.
        cuts: along which dimension those are cut, by name, where other launchers have other parts.
    """

    text: str
    tensors: dict[str, torch.Tensor]
    ranks: range
    size: int
    cuts: dict[str, int]

    @property
    def is_whole(self) -> bool:
        """Whether it has all parts; otherwise other launchers have the others."""
        return not self.cuts

    def stored(self) -> dict[str, Stored]:
        """Return the tensors, copied where and as far as they are read."""
        return {
            name: Stored(tensor.shape, tensor.dtype, partial(self._fetch, name))
            for name, tensor in self.tensors.items()
        }

    def _fetch(self, name: str, box: Box) -> torch.Tensor:
        tensor = self.tensors[name]
        if name in self.cuts:
            dimension = self.cuts[name]
            cut = Cut(dimension, self.size)
            first, last = (cut.box(tensor.shape, rank) for rank in (self.ranks[0], self.ranks[-1]))
            start, stop = first.offsets[dimension], last.offsets[dimension] + last.sizes[dimension]
            begin = box.offsets[dimension]
            if box.numel and not start <= begin <= begin + box.sizes[dimension] <= stop:
                raise CheckpointError(f"another launcher has a part of {name} in its memory")
        return box.of(tensor).clone()


class Snapshots:
    """The memory for snapshots, as one rank sees it.

    Make it before the rendezvous of the ranks: what the generation before has left is looked at here.

    Args:
        descriptors: the memory.
        tag: of the run, as `memory.tag_of` makes it.
        part: number of this rank among those of its launcher.
        parts: how many they are.
        first: the first rank of the launcher.
        size: number of ranks of all launchers; `None` where there is one launcher.

    Attributes:
        parts: how many ranks the launcher has.
        number: of the first snapshot that this generation takes.
        found: the newest snapshot of this run that the generation before has left; `None` once the run goes
            on, since it is overwritten then.
        is_spoken_for: whether it holds a run that the script comes to after this one: a generation began
            again with the first of several runs, and the one that was interrupted waits here.
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
        self.number = next_number(self._buffers)
        self._layouts: list[Layout | None] = [None, None]
        self._copies: list[list[tuple[str, torch.Tensor, slice | None]]] = [[], []]
        self.found = self.newest()
        left = newest(self._buffers)
        self.is_spoken_for = left is not None and run_of(left.tag) > run_of(tag)

    def newest(self) -> Snapshot | None:
        """Return the newest whole snapshot, if it is of this run."""
        buffer = newest(self._buffers)
        if buffer is None or buffer.tag != self._tag:
            return None
        head = json.loads(buffer.text)
        data = buffer.data
        layout = Layout.parse(head["layout"], len(data))
        tensors = {name: layout.view(data, name) for name in layout.places}
        first, stop, size = head["ranks"]
        return Snapshot(head["text"], tensors, range(first, stop), size, head["cuts"])

    def is_ready(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return whether there is memory for `tensors`."""
        size = Layout.of(tensors).size
        return all(os.fstat(descriptor).st_size > size for descriptor in self._descriptors.buffers)

    def missing(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int] | None:
        """Return the bytes that snapshots of `tensors` take and those that are free, if that is too few.

        Half of what is free must stay: the script may need it.
        """
        has = sum(os.fstat(descriptor).st_size for descriptor in self._descriptors.buffers)
        wanted = 2 * self._bytes_here(tensors) - has
        limit, free = memory_left(), psutil.virtual_memory().available
        free = free if limit is None else min(free, limit)
        return None if wanted <= free // 2 else (wanted, free)

    def prepare(self, text: str, tensors: Mapping[str, torch.Tensor]) -> threading.Thread | None:
        """Take memory for `tensors`; return the thread that does it where it takes long."""
        layout = Layout.of(tensors)
        # Twice the text: it grows with the numbers in it.
        sizes = (2 * len(self._head(text, layout, tensors)), layout.size)
        is_filled = not self._cuts(tensors)

        def take() -> None:
            for buffer, descriptor in zip(self._buffers, self._descriptors.buffers, strict=True):
                buffer.reserve(*sizes)
                # The first write to each page would be slow; the kernel does it without our lock. Where
                # other launchers have parts, pages of those are not taken.
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
        told = {"text": text, "layout": layout.as_json(), "ranks": ranks, "cuts": cuts}
        return json.dumps(told).encode()

    def _cuts(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Cut]:
        """Return how those tensors are cut of which other launchers have parts."""
        if len(self._ranks) == self._size:
            return {}
        return {name: cut for name, tensor in tensors.items() if (cut := cut_of(tensor))}

    def _bytes_here(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Return the bytes that the ranks of this launcher copy."""
        layout = Layout.of(tensors)
        cut = sum(layout.places[name].size for name in self._cuts(tensors))
        return layout.size - cut * (self._size - len(self._ranks)) // self._size

    def write(self, number: int, text: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's part of `tensors`; every rank of the launcher does so at the same point."""
        which = number % 2
        buffer, other = self._buffers[which], self._buffers[1 - which]
        other.refresh()
        buffer.refresh()
        if buffer.number and not other.number:
            return  # the only whole one stays
        layout = Layout.of(tensors)
        head = self._head(text, layout, tensors)
        buffer.reserve(len(head), layout.size)
        buffer.begin(self._part)
        if self._part == 0:
            buffer.describe(self._tag, head, layout.size, self.parts)
        self._copy(which, layout, buffer, tensors)
        buffer.commit(self._part, number)

    def _copy(
        self,
        which: int,
        layout: Layout,
        buffer: Buffer,
        tensors: Mapping[str, torch.Tensor],
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
            torch._foreach_copy_(targets, sources)
        if any(accelerator.holds(source) for source in sources):
            accelerator.module().synchronize()

    def _targets(
        self, layout: Layout, data: memoryview, tensors: Mapping[str, torch.Tensor]
    ) -> list[tuple[str, torch.Tensor, slice | None]]:
        """Return what this rank copies: whole tensors, slices at the ends of its share, its own parts."""
        first = layout.size * self._part // self.parts
        stop = layout.size * (self._part + 1) // self.parts
        copies: list[tuple[str, torch.Tensor, slice | None]] = []
        for name, place in layout.places.items():
            target = layout.view(data, name)
            if (cut := cut_of(tensors[name])) is not None:
                rank = self._ranks[self._part]
                if rank < cut.count:
                    box = cut.box(place.shape, rank)
                    copies.append((name, box.of(target), None))
                continue
            inside = first <= place.offset < stop
            if not tensors[name].is_contiguous() or place.size < _AT_ONCE // 64:
                if inside:
                    copies.append((name, target, None))
                continue
            width = place.dtype.itemsize
            # Elements that begin in this rank's part.
            lo = max(0, -(-(first - place.offset) // width))
            hi = min(place.shape.numel(), -(-(stop - place.offset) // width))
            if lo < hi:
                whole = (lo, hi) == (0, place.shape.numel())
                part = None if whole else slice(lo, hi)
                copies.append((name, target if whole else target.reshape(-1)[lo:hi], part))
        return copies
