"""Sources of microbatches: map-style datasets, and iterable datasets that are read once."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lockstep.engine.data.description import Description, checksum
from lockstep.engine.data.fetch import Collate, Fetch, Look, Request
from lockstep.engine.data.microbatch import Batching, Microbatch
from lockstep.engine.data.orders import Batches, Drawn
from lockstep.engine.data.randomness import Stream, set_key, undisturbed
from lockstep.engine.layout import keys
from lockstep.engine.layout.permutation import Indices
from lockstep.engine.layout.replicas import share

#: Is given what a rank holds of its data: names and short values.
Tell = Callable[[dict[str, str]], None]
#: A global batch of one rank: its microbatches, each with the data that belongs to it.
Batch = Iterator[tuple[Microbatch, Any]]
#: Given the number of a global batch, returns the replica that is computed once more; `None` for none.
Audited = Callable[[int], int | None]


def no_audit(_batch: int) -> int | None:
    """Return that no replica of a global batch is computed once more."""
    return None


_CHUNK = 16384  # positions whose indices are computed at once: cheap in memory, amortised in time


@dataclass(frozen=True, slots=True)
class Split:
    """How global batches are split: `replicas` in all, of which this rank hosts `block`."""

    replicas: int
    block: range


class Source(Protocol):
    """What a loader draws from."""

    def batching(self) -> Batching:
        """Return how a loop that begins now makes its batches."""

    def batches(
        self,
        loader: int,
        epoch: int,
        round_: int,
        first: int = 0,
        tell: Tell | None = None,
        audited: Audited = no_audit,
    ) -> Iterator[Batch]:
        """Yield this rank's part of each global batch of one loop over the data, from number `first` on.

        `tell` is first given what can be compared with other ranks: a description and some samples.
        """

    def close(self) -> None:
        """Let go of worker processes."""


@dataclass(frozen=True, slots=True)
class Workers:
    """Settings that go to the DataLoader as they are."""

    count: int = 0
    pin_memory: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    threads: int = 1


@dataclass(frozen=True, slots=True)
class _Start:
    """What a worker process does first: compute as the main process would, then what the user asks."""

    own: Callable[[int], None] | None
    threads: int

    def __call__(self, worker: int) -> None:
        # DataLoader gives workers one thread, and a sum over two has other bits.
        torch.set_num_threads(self.threads)
        if self.own is not None:
            self.own(worker)


class _KeyedStream(IterableDataset[Any]):
    """A stream that begins under its loop's key, in whichever process it is read."""

    def __init__(self, dataset: IterableDataset[Any]) -> None:
        self._dataset = dataset
        self.key = 0

    def __iter__(self) -> Iterator[Any]:
        set_key(self.key)
        yield from self._dataset


class _Requests:
    """The sampler of a DataLoader: hands out the requests of the loop that is about to start."""

    def __init__(self) -> None:
        self.pending: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.pending)


class _Fetched(Dataset[Any]):
    """A dataset whose items are whole microbatches."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch

    def __getitem__(self, request: Request) -> Any:
        if isinstance(request, Look):
            # Twice: a dataset that changes its samples gives others then.
            return [checksum(self._fetch.samples(request)) for _ in range(2)]
        return self._fetch(request)


def _as_is(batch: Any) -> Any:
    return batch


class MapSource:
    """A dataset with a length and an index: every sample has a position in the epoch's order."""

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
        self._loader = self._make_loader(workers) if workers.count else None
        self._is_read = False

    def _make_loader(self, workers: Workers) -> DataLoader[Any]:
        own = workers.settings.get("worker_init_fn")
        settings = {**workers.settings, "worker_init_fn": _Start(own, workers.threads)}
        return DataLoader(
            self._fetched,
            sampler=self._requests,
            batch_size=None,
            collate_fn=_as_is,
            num_workers=workers.count,
            pin_memory=workers.pin_memory,
            **settings,
        )

    def __len__(self) -> int:
        return len(self._batches)

    def batching(self) -> Batching:
        """Return how a loop that begins now makes its batches."""
        return self._batches.batching(self._description.indices())

    def batches(
        self,
        loader: int,
        epoch: int,
        round_: int,
        first: int = 0,
        tell: Tell | None = None,
        audited: Audited = no_audit,
    ) -> Iterator[Batch]:
        """Yield this rank's part of each global batch of one loop over the data, from number `first` on.

        `tell` is first given what can be compared with other ranks: a description and some samples.
        """
        drawn = self._batches.draw(loader, epoch, round_)
        plan = self._plan(drawn, (loader, epoch, round_), first, audited)
        planned, to_fetch = itertools.tee(plan)
        requests = (Request(m.indices, m.numbers) for batch in to_fetch for m in batch)
        if tell is None or first == len(self):
            data = self._fetch_all(requests)
        else:
            data = self._look(drawn, (loader, epoch, round_, first, -1), requests, tell)
        outermost, self._is_read = not self._is_read, True
        try:
            for batch in planned:
                yield zip(batch, data, strict=False)  # the data of later batches follow
        finally:
            self._is_read = not outermost

    def _look(
        self,
        drawn: Drawn,
        numbers: tuple[int, int, int, int, int],
        requests: Iterable[Request],
        tell: Tell,
    ) -> Iterator[Any]:
        """Return the data of `requests`, after a look at a few samples of the first batch.

        Some rank fetches those anyway, and they go the way of all others: a dataset with workers is not
        touched in this process.
        """
        batch = drawn.order(*map(drawn.start, (numbers[3], numbers[3] + 1)))
        some = np.unique(batch[[0, len(batch) // 2, -1]])
        data = self._fetch_all(itertools.chain([Look(some, numbers)], requests))
        with undisturbed():
            samples, again = next(data)
        shown = ", ".join(map(str, some.tolist()))
        seen = {"order": checksum(batch), "shown": shown, "samples": samples, "again": again}
        tell({**self._description.parts(), **seen})
        return data

    def _fetch_all(self, requests: Iterable[Request]) -> Iterator[Any]:
        # A loop inside a loop over the same loader fetches by itself: the workers are busy.
        if self._loader is None or self._is_read:
            return map(self._fetched.__getitem__, requests)
        self._requests.pending = requests
        with undisturbed():  # it draws a seed for its workers, which keys make pointless
            return iter(self._loader)

    def close(self) -> None:
        """Let go of worker processes."""
        self._loader = None

    def _plan(
        self, drawn: Drawn, loop: tuple[int, int, int], first: int, audited: Audited
    ) -> Iterator[list[Microbatch]]:
        offset = known = 0
        stop = drawn.start(first)
        for step in range(first, len(self)):
            start, stop = stop, drawn.start(step + 1)
            if stop > known:
                offset, known = start, min(max(stop, start + _CHUNK), len(drawn.order))
                indices = drawn.order(offset, known)
            batch = indices[start - offset : stop - offset]
            yield split_batch(batch, self._split, (*loop, step), audited(step))


def split_batch(
    indices: Indices, split: Split, numbers: tuple[int, int, int, int], audited: int | None
) -> list[Microbatch]:
    """Return this rank's microbatches of the global batch that holds the samples `indices`.

    The one of the replica `audited` comes before the others.
    """
    microbatches, total = [], len(indices)
    extra = [] if audited is None else [audited]
    for place, replica in enumerate([*extra, *split.block], start=-len(extra)):
        part = share(total, split.replicas, replica)
        microbatches.append(
            Microbatch(
                *numbers,
                replica,
                size=len(part),
                total=total,
                first=place <= 0,
                last=place == len(split.block) - 1,
                indices=indices[part.start : part.stop] if part else indices[:1],
                audit=place < 0,
            )
        )
    return microbatches


class StreamSource:
    """An iterable dataset: every rank reads the whole stream and keeps its own replicas' items.

    Reading everything everywhere is what makes the assignment independent of the layout without any
    talk between ranks; a map-style dataset is the cheaper choice where there is one.
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
            own = workers.settings.get("worker_init_fn")
            settings = {**workers.settings, "worker_init_fn": _Start(own, workers.threads)}
            self._items = DataLoader(
                self._stream,
                batch_size=None,
                collate_fn=_as_is,
                num_workers=workers.count,
                **{**settings, "persistent_workers": False},  # each loop's worker knows its key
            )

    def batching(self) -> Batching:
        """Return how a loop that begins now makes its batches."""
        return Batching(
            batch_size=self._batch_size,
            samples=None,
            order="stream",
            drop_last=self._drop_last,
        )

    def batches(
        self,
        loader: int,
        epoch: int,
        round_: int,
        first: int = 0,
        tell: Tell | None = None,
        audited: Audited = no_audit,
    ) -> Iterator[Batch]:
        """Yield this rank's part of each global batch of one loop over the stream.

        A stream has no places to start from: batches before number `first` are read and dropped. Of what
        ranks hold, `tell` is given the kind alone.
        """
        if tell is not None:
            tell({"kind": self._kind})
        self._stream.key = keys.derive(self._seed, keys.STREAM, loader, epoch, round_)
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
            parts = split_batch(indices, self._split, (loader, epoch, round_, step), audited(step))
            yield ((m, self._collated(m, batch)) for m in parts)

    def close(self) -> None:
        """Let go of the worker process."""
        self._items = ()

    def _collated(self, microbatch: Microbatch, batch: list[Any]) -> Any:
        part = share(len(batch), self._split.replicas, microbatch.replica)
        set_key(keys.derive(self._seed, keys.BATCH, *microbatch.numbers))
        return self._collate(batch[part.start : part.stop] or batch[:1])
