"""The loader: global batches, of which this rank sees the microbatches of its replicas."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from lockstep.data.microbatch import Microbatch, Observer
from lockstep.data.move import to_device
from lockstep.data.sources import Batch, MapSource, Source


class GlobalBatch:
    """One global batch: iterating over it gives this rank's microbatches.

    Each iteration is one *pass*. A second pass sees the same data again, for scripts that update
    twice per batch, such as a generator and a discriminator.
    """

    def __init__(self, batch: Batch, observer: Observer, device: torch.device | None) -> None:
        self._batch = batch
        self._observer = observer
        self._device = device
        self._seen: list[tuple[Microbatch, Any]] = []
        self._turn = 0

    def __iter__(self) -> Iterator[Any]:
        if self._turn == 0:
            return self._first_pass(keep=True)
        self._turn += 1
        turn = self._turn - 1
        return self._run((replace(m, turn=turn), data) for m, data in self._seen)

    def once(self) -> Iterator[Any]:
        """Iterate for the only time: nothing is kept for another pass."""
        return self._first_pass(keep=False)

    def _first_pass(self, *, keep: bool) -> Iterator[Any]:
        self._turn = 1
        for microbatch, data in self._batch:
            moved = data if self._device is None else to_device(data, self._device)
            if keep:
                self._seen.append((microbatch, moved))
            yield from self._show(microbatch, moved)

    def _run(self, pairs: Batch) -> Iterator[Any]:
        for microbatch, data in pairs:
            yield from self._show(microbatch, data)

    def _show(self, microbatch: Microbatch, data: Any) -> Iterator[Any]:
        if microbatch.size == 0 and not torch.is_grad_enabled():
            return  # a stand-in only keeps backward passes matched; evaluation has none
        self._observer.microbatch_begins(microbatch)
        yield data
        self._observer.microbatch_ends(microbatch)


class Loader:
    """Iterates over this rank's microbatches; `len()` is the number of global batches.

    Made by `Run.loader`.

    Attributes:
        number: in which order the run made its loaders; part of every key.
        batch_size: samples per global batch.
    """

    def __init__(
        self,
        source: Source,
        observer: Observer,
        *,
        number: int,
        batch_size: int,
        device: torch.device | None,
    ) -> None:
        self._source = source
        self._observer = observer
        self._device = device
        self.number = number
        self.batch_size = batch_size

    def __len__(self) -> int:
        """Return the number of global batches in one loop over the data.

        Raises:
            TypeError: if the data is a stream, whose length nobody knows.
        """
        if not isinstance(self._source, MapSource):
            raise TypeError("a loader over an IterableDataset has no length")
        return len(self._source)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches():
            yield from batch.once()

    def batches(self) -> Iterator[GlobalBatch]:
        """Yield each global batch, to be iterated over once or more."""
        epoch, round_ = self._observer.loop_begins(self.number)
        step = 0
        early = True
        try:
            for batch in self._source.batches(self.number, epoch, round_):
                yield GlobalBatch(batch, self._observer, self._device)
                step += 1
            early = False
        finally:
            self._observer.loop_ends(self.number, epoch, round_, step, early=early)
