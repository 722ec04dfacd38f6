"""`MapSource` and `StreamSource`: sources of microbatches from map-style and iterable datasets."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep.engine.data.description import Description, checksum
from lockstep.engine.data.fetch import CheckRequest, Collate, Fetch, FetchRequest
from lockstep.engine.data.microbatch import Batching, LoopKey, Microbatch
from lockstep.engine.data.orders import Batches, LoopBatches
from lockstep.engine.data.randomness import Stream, set_key, undisturbed
from lockstep.engine.layout import keys
from lockstep.engine.layout.permutation import Indices
from lockstep.engine.layout.replicas import share

#: Compares a description of this rank's data, names and short values, with other ranks.
CompareData = Callable[[dict[str, str]], None]
#: One rank's part of a global batch: its microbatches with their data.
Batch = Iterator[tuple[Microbatch, Any]]
#: Function from the number of a global batch to the replica that an audit computes twice; `None` for none.
Audited = Callable[[int], int | None]


def no_audit(_batch: int) -> int | None:
    """Return `None`, the answer for a batch without an audit.

    Loops without audits use this function: no microbatch is computed twice.
    """
    return None


_CHUNK = 16384  # number of positions whose indices are computed at once


@dataclass(frozen=True, slots=True)
class Split:
    """Division of global batches over the replicas of the run.

    Attributes:
        replicas: number of replicas.
        block: numbers of the replicas that this rank computes.
    """

    replicas: int
    block: range


@dataclass(frozen=True, slots=True)
class Workers:
    """Settings of the worker processes of a torch DataLoader.

    Attributes:
        count: number of worker processes.
        settings: other keywords of DataLoader.
        threads: number of torch threads in each worker process.
    """

    count: int = 0
    pin_memory: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    threads: int = 1


@dataclass(frozen=True, slots=True)
class _WorkerInit:
    """`worker_init_fn` of DataLoader workers: sets the number of torch threads, then calls `users`.

    `users`: the script's own `worker_init_fn`; `None` without one.
    """

    users: Callable[[int], None] | None
    threads: int

    def __call__(self, worker: int) -> None:
        # DataLoader gives workers one thread, and the bits of sums depend on the number of threads.
        torch.set_num_threads(self.threads)
        if self.users is not None:
            self.users(worker)


def _with_workers(dataset: Any, workers: Workers, **more: Any) -> DataLoader[Any]:
    """Return a DataLoader whose workers fetch the items of `dataset` without collating them.

    `more`: further keyword arguments of the DataLoader.
    """
    init = _WorkerInit(workers.settings.get("worker_init_fn"), workers.threads)
    settings = {**workers.settings, "worker_init_fn": init, **more}
    return DataLoader(
        dataset, batch_size=None, collate_fn=_as_is, num_workers=workers.count, **settings
    )


def _as_is(batch: Any) -> Any:
    return batch


class _KeyedStream(IterableDataset[Any]):
    """Wraps an iterable dataset: seeds the global generators with `key` before the first item."""

    def __init__(self, dataset: IterableDataset[Any]) -> None:
        self._dataset = dataset
        self.key = 0

    def __iter__(self) -> Iterator[Any]:
        set_key(self.key)
        yield from self._dataset


class _Requests:
    """Sampler for a DataLoader, which yields `FetchRequest`s for microbatches instead of indices."""

    def __init__(self) -> None:
        self.pending: Iterable[FetchRequest] = ()

    def __iter__(self) -> Iterator[FetchRequest]:
        return iter(self.pending)


class _Fetched(Dataset[Any]):
    """Dataset for a DataLoader: an index is a `FetchRequest`, and an item is a whole microbatch.

    For a `CheckRequest` the item is a pair of checksums, of two fetches of the same samples.
    """

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def __getitem__(self, request: FetchRequest) -> Any:
        if isinstance(request, CheckRequest):
            # Twice, to detect a dataset that changes its samples.
            return [checksum(self._fetch.samples(request)) for _ in range(2)]
        return self._fetch(request)


class MapSource:
    """Source of microbatches from a map-style dataset.

    The order of the samples is drawn for each loop.
    """

    def __init__(
        self,
        fetch: Fetch,
        batches: Batches,
        split: Split,
        workers: Workers,
        description: Description,
    ) -> None:
        self._fetched, self._batches, self._split = _Fetched(fetch), batches, split
        self._description = description
        self._requests = _Requests()
        self._loader: DataLoader[Any] | None = None
        if workers.count:
            more = {"sampler": self._requests, "pin_memory": workers.pin_memory}
            self._loader = _with_workers(self._fetched, workers, **more)
        self._is_read = False

    def __len__(self) -> int:
        return len(self._batches)

    def batching(self) -> Batching:
        """Return the settings that decide which samples each batch has, in a loop that begins now."""
        return self._batches.batching(self._description.indices())

    def batches(
        self,
        loop: LoopKey,
        first: int = 0,
        compare: CompareData | None = None,
        audited: Audited = no_audit,
    ) -> Iterator[Batch]:
        """Yield this rank's microbatches of each global batch of `loop`, from batch `first` on.

        Args:
            loop: the loop, which decides the order of the samples.
            first: number of the first batch.
            compare: function that compares named checksums of the data with other ranks; `None` for
                no comparison.
            audited: function from a batch's number to the replica whose microbatch an audit
                computes twice, or `None`.
        """
        drawn = self._batches.draw(loop)
        plan = self._plan(drawn, loop, first, audited)
        planned, to_fetch = itertools.tee(plan)
        requests = (FetchRequest(m.indices, m.numbers) for batch in to_fetch for m in batch)
        if compare is None or first == len(self):
            data = self._fetch_all(requests)
        else:
            data = self._compare(drawn, loop, first, requests, compare)
        outermost, self._is_read = not self._is_read, True
        try:
            for batch in planned:
                yield zip(batch, data, strict=False)  # `data` continues with later batches
        finally:
            self._is_read = not outermost

    def _compare(
        self,
        drawn: LoopBatches,
        loop: LoopKey,
        first: int,
        requests: Iterable[FetchRequest],
        compare: CompareData,
    ) -> Iterator[Any]:
        """Compare samples of the first batch with other ranks; return an iterator over microbatches.

        The iterator yields the data of `requests`. If there are DataLoader workers, they fetch the compared
        samples, too, so that this process does not use the dataset.

        `drawn`: the global batches of `loop`. `first`: number of the loop's first batch. `compare`:
        function that compares named checksums with other ranks.
        """
        batch = drawn.order(drawn.start(first), drawn.start(first + 1))
        some = np.unique(batch[[0, len(batch) // 2, -1]])
        request = CheckRequest(some, (*loop, first, -1))  # -1: of no replica
        data = self._fetch_all(itertools.chain([request], requests))
        with undisturbed():
            samples, again = next(data)
        shown = ", ".join(map(str, some.tolist()))
        seen = {"order": checksum(batch), "shown": shown, "samples": samples, "again": again}
        compare({**self._description.parts(), **seen})
        return data

    def _fetch_all(self, requests: Iterable[FetchRequest]) -> Iterator[Any]:
        # A loop inside a loop over the same loader fetches in this process: the workers are busy.
        if self._loader is None or self._is_read:
            return map(self._fetched.__getitem__, requests)
        self._requests.pending = requests
        with undisturbed():  # the DataLoader draws a seed for its workers
            return iter(self._loader)

    def close(self) -> None:
        """End the DataLoader worker processes."""
        self._loader = None

    def _plan(
        self, drawn: LoopBatches, loop: LoopKey, first: int, audited: Audited
    ) -> Iterator[list[Microbatch]]:
        offset = known = 0
        stop = drawn.start(first)
        for step in range(first, len(self)):
            start, stop = stop, drawn.start(step + 1)
            if stop > known:
                offset, known = start, min(max(stop, start + _CHUNK), len(drawn.order))
                indices = drawn.order(offset, known)
            batch = indices[start - offset : stop - offset]
            yield split_batch(batch, self._split, loop, step, audited(step))


def split_batch(
    indices: Indices, split: Split, loop: LoopKey, step: int, audited: int | None
) -> list[Microbatch]:
    """Divide the samples of a global batch over replicas; return this rank's microbatches.

    `indices`: dataset indices of the samples. `step`: number of the batch in `loop`. `audited`: replica
    whose microbatch an audit computes twice; the extra microbatch is returned first. `None` for no audit.
    """
    total = len(indices)
    microbatches = [
        Microbatch(*loop, step, replica, size, total, first, last, indices[part])
        for replica, size, first, last, part in _shares(split, total)
    ]
    if audited is not None:
        _, size, _, _, part = _share(split, total, audited)
        extra = Microbatch(
            *loop, step, audited, size, total, True, False, indices[part], audit=True
        )
        microbatches.insert(0, extra)
    return microbatches


@functools.lru_cache
def _shares(split: Split, total: int) -> tuple[tuple[int, int, bool, bool, slice], ...]:
    """Return the shares of this rank's replicas in a global batch of `total` samples.

    Of each share: the replica, the number of samples, whether the share is the rank's first, whether it is
    the last, and the positions of the samples in the batch. An empty share has the position of one sample.
    They are cached, since almost all batches of a loop have the same size.
    """
    return tuple(_share(split, total, replica) for replica in split.block)


def _share(split: Split, total: int, replica: int) -> tuple[int, int, bool, bool, slice]:
    part, block = share(total, split.replicas, replica), split.block
    is_first, is_last = replica == block.start, replica == block.stop - 1
    return replica, len(part), is_first, is_last, slice(part.start, part.stop) if part else slice(1)


class StreamSource:
    """Source of microbatches from an iterable dataset, which every rank reads completely.

    A rank drops the items of other ranks' replicas. So the division of items does not depend on the layout,
    and ranks need no communication. With a map-style dataset each rank reads only its own samples.
    """

    def __init__(
        self,
        dataset: IterableDataset[Any],
        collate: Collate,
        split: Split,
        workers: Workers,
        *,
        batch_size: int,
        seed: int,
        drop_last: bool,
    ) -> None:
        self._collate, self._split, self._seed = collate, split, seed
        self._batch_size, self._drop_last = batch_size, drop_last
        self._stream, self._kind = _KeyedStream(dataset), type(dataset).__name__
        self._items: Iterable[Any] = self._stream
        if workers.count:
            # A new worker process for each loop, which starts with the loop's key.
            self._items = _with_workers(self._stream, workers, persistent_workers=False)

    def batching(self) -> Batching:
        """Return the settings that decide which items each batch has."""
        size, drop_last = self._batch_size, self._drop_last
        return Batching(batch_size=size, samples=None, order="stream", drop_last=drop_last)

    def batches(
        self,
        loop: LoopKey,
        first: int = 0,
        compare: CompareData | None = None,
        audited: Audited = no_audit,
    ) -> Iterator[Batch]:
        """Yield this rank's microbatches of each global batch of `loop`, from batch `first` on.

        Items of earlier batches are read and dropped. The arguments are those of `MapSource.batches`; with
        other ranks only the class name of the dataset is compared.
        """
        if compare is not None:
            compare({"kind": self._kind})
        self._stream.key = keys.derive(self._seed, keys.STREAM, *loop)
        stream = Stream(self._stream.key)
        with stream.active():
            items = iter(self._items)
        position = 0
        for step in itertools.count():
            with stream.active():
                batch = list(itertools.islice(items, self._batch_size))
            if not batch or (self._drop_last and len(batch) < self._batch_size):
                return
            indices = np.arange(position, position + len(batch), dtype=np.int64)
            position += len(batch)
            if step < first:
                continue
            parts = split_batch(indices, self._split, loop, step, audited(step))
            yield ((m, self._collated(m, batch)) for m in parts)

    def close(self) -> None:
        """Release the DataLoader and its worker process, if there is one."""
        self._items = ()

    def _collated(self, microbatch: Microbatch, batch: list[Any]) -> Any:
        part = share(len(batch), self._split.replicas, microbatch.replica)
        set_key(keys.derive(self._seed, keys.BATCH, *microbatch.numbers))
        return self._collate(batch[part.start : part.stop] or batch[:1])


Source = MapSource | StreamSource
