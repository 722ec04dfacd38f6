"""`Loader` and `GlobalBatch`: iterables over the microbatches that this rank computes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator, Iterator, MutableMapping
from typing import Any, TypeVar

import torch

from lockstep.engine.data.microbatch import Microbatch, Observer, Start
from lockstep.engine.data.sources import Batch, CompareData, MapSource, Source
from lockstep.errors import LoaderError

T = TypeVar("T")
#: Wraps an iterator to measure the time that its items take.
Measure = Callable[[Iterator[Any]], Iterator[Any]]


class GlobalBatch:
    """A global batch of a loader; each iteration over it yields this rank's microbatches.

    A second iteration yields the same data again, for scripts that update twice per batch, as for a
    generator and a discriminator.

    Attributes:
        index: number of the batch in its loop, from 0, the same on every layout and after a resume.
    """

    def __init__(self, batch: Batch, observer: Observer, index: int) -> None:
        self.index = index
        self._batch, self._observer = batch, observer
        self._seen: list[tuple[Microbatch, Any]] = []
        self._turn = 0
        self._is_over = False

    def __iter__(self) -> Iterator[Any]:
        turn, self._turn = self._turn, self._turn + 1
        return self._pass(turn)

    def ahead(self) -> Iterator[Any]:
        """Return an additional iterator over this rank's microbatches, for `run.all_gather`.

        The script draws the same random numbers in this iteration and in its next own one. The extra
        microbatch of an audit, which is computed twice, is left out.
        """
        return self._pass(self._turn, audits=False)

    def _pass(self, turn: int, *, audits: bool = True) -> Iterator[Any]:
        if self._is_over:
            raise LoaderError(
                "a global batch was iterated over after the next one had been asked for",
                hint="use each batch inside `for batch in run.batches(loader): …`",
            )
        replayed = self._replay()
        pairs = ((m._replace(turn=turn), data) for m, data in replayed if audits or not m.audit)
        return observed(show(pairs, self._observer, shown=True), self._observer)

    def pass_over(self) -> None:
        """End this batch: fetch its remaining microbatches, so that those of the next batch can follow.

        Later iterations over this batch raise a `LoaderError`.
        """
        self._is_over = True
        for _ in self._batch:
            pass

    def _replay(self) -> Batch:
        """Yield all microbatches of this batch with their data.

        Those that an earlier iteration has fetched are not fetched again.
        """
        yield from tuple(self._seen)
        for pair in self._batch:
            self._seen.append(pair)
            yield pair


def show(pairs: Batch, observer: Observer, *, shown: bool) -> Generator[Any]:
    """Yield the data of each microbatch, and call `observer` before and after the loop's body.

    `pairs`: microbatches with their data. `shown`: whether the script iterates over a `GlobalBatch`, and
    not over the loader itself.
    """
    microbatch = None
    for microbatch, data in pairs:
        if not observer.takes(microbatch):
            continue
        observer.microbatch_begins(microbatch, data)
        left = True
        try:
            yield data
            left = False
        finally:
            observer.microbatch_ends(microbatch, left=left)
    if microbatch is not None:
        observer.pass_ends(microbatch, shown=shown)


def observed(items: Generator[T], observer: Observer) -> Iterator[T]:
    """Yield the items of the generator `items`, and report its exceptions to `observer`.

    So the run knows of an exception even if the script catches it.
    """
    try:
        for item in items:  # noqa: UP028 - to be left while `items` can still be closed
            yield item
    except GeneratorExit:
        try:
            items.close()
        except (Exception, SystemExit) as error:  # Python would only print it
            observer.fails(error)
        raise
    except (Exception, SystemExit) as error:
        observer.fails(error)
        raise


class Loader:
    """Iterable over this rank's microbatches, made by `Run.loader`.

    `len()` counts global batches.

    Attributes:
        number: index of the loader, in the order of `run.loader` calls.
        batch_size: samples per global batch; `None` with a batch sampler.
        dataset: the dataset that samples are taken from.
        sampler: the script's sampler, or batch sampler; `None` without one.
    """

    def __init__(
        self,
        source: Source,
        observer: Observer,
        *,
        number: int,
        batch_size: int | None,
        device: torch.device | None,
        compare: CompareData | None = None,
        measure: Measure = iter,
        dataset: Any = None,
        sampler: Any = None,
    ) -> None:
        self.number, self.batch_size = number, batch_size
        self.dataset, self.sampler = dataset, sampler
        self._source, self._observer = source, observer
        self._device, self._compare, self._measure = device, compare, measure

    def __len__(self) -> int:
        """Return the number of global batches in one loop over the data.

        Raises:
            TypeError: if the dataset is an IterableDataset, which has no length.
        """
        if not isinstance(self._source, MapSource):
            raise TypeError("a loader over an IterableDataset has no length")
        return len(self._source)

    def close(self) -> None:
        """End the DataLoader worker processes of this loader."""
        self._source.close()

    def __iter__(self) -> Iterator[Any]:
        def microbatches() -> Generator[Any]:
            for _, batch in self._loop(shown=False):
                yield from show(batch, self._observer, shown=False)

        return observed(microbatches(), self._observer)

    def batches(self) -> Iterator[GlobalBatch]:
        """Yield each global batch as a `GlobalBatch`, for one or more iterations over its microbatches."""

        def global_batches() -> Generator[GlobalBatch]:
            for index, batch in self._loop(shown=True):
                whole = GlobalBatch(batch, self._observer, index)
                yield whole
                whole.pass_over()

        return observed(global_batches(), self._observer)

    def _loop(self, *, shown: bool) -> Iterator[tuple[int, Batch]]:
        """Yield each global batch of one loop, as its number and an iterator over this rank's microbatches.

        `shown`: whether the script gets each batch as a `GlobalBatch`.
        """
        start = self._observer.loop_begins(self.number, self._source.batching)
        step, early = start.first, True
        try:
            for batch in self._measure(self._batches(start)):
                self._observer.batch_begins(start, step, shown=shown)
                pairs: Batch = self._measure(batch)
                if (device := self._device) is not None:
                    pairs = ((m, to_device(data, device)) for m, data in pairs)
                yield step, pairs
                step += 1
                if self._observer.batch_ends(start):
                    break
            early = start.is_over
        finally:
            self._observer.loop_ends(start, step, early=early)

    def _batches(self, start: Start) -> Iterator[Batch]:
        if start.is_over and start.again is None:
            return iter(())
        compare, self._compare = self._compare, None  # ranks compare data only in the first loop
        audited = self._observer.audit_plan(start)
        return self._source.batches(start.key, start.first, compare, audited)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return `batch` with every tensor inside lists, tuples and mappings moved to `device`.

    An object with a method `to` is moved by that method. Copies from pinned memory don't block the host.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if callable(getattr(batch, "to", None)):
        return batch.to(device)
    if isinstance(batch, MutableMapping):
        moved = copy.copy(batch)  # keeps the class and the attributes of the mapping
        moved.update({key: to_device(value, device) for key, value in batch.items()})
        return moved
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(to_device(value, device) for value in batch)
    return batch
