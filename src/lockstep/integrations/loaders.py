"""Make a run's loader from a DataLoader: a global batch joins several batches of the DataLoader."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from lockstep.engine.data.loader import Loader
from lockstep.integrations.process import refuse
from lockstep.run import Run


class _JoinedBatchSampler:
    """A batch sampler that joins every `count` successive batches of another batch sampler into one."""

    def __init__(self, batches: Any, count: int) -> None:
        self._batches, self._count = batches, count
        self.sampler = getattr(batches, "sampler", None)

    def __len__(self) -> int:
        return math.ceil(len(self._batches) / self._count)

    def __iter__(self) -> Iterator[list[int]]:
        batches = iter(self._batches)
        # A batch sampler may fill one list again and again.
        while joined := [list(batch) for batch in islice(batches, self._count)]:
            yield list(chain.from_iterable(joined))

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the wrapped batch sampler, if it has this method."""
        if hasattr(self._batches, "set_epoch"):
            self._batches.set_epoch(epoch)


def global_loader(
    run: Run, data: Any, times: int | None = None, *, complete: bool = False
) -> Loader:
    """Return a loader whose global batch joins `times` batches of `data`; by default, one per replica.

    Args:
        run: the run that computes the batches.
        data: a DataLoader; a loader of the run is returned unchanged.
        times: number of batches of `data` that make one global batch.
        complete: whether to include the samples that `drop_last` of `data` leaves out.

    Raises:
        UsageError: if `data` is neither a DataLoader nor a loader of the run.
    """
    if isinstance(data, Loader):
        return data
    if not isinstance(data, DataLoader):
        refuse(f"a loader of type {type(data).__name__}", "a torch.utils.data.DataLoader")
    times = times or run.replicas
    workers: dict[str, Any] = {"num_workers": data.num_workers, "pin_memory": data.pin_memory}
    if data.num_workers:
        names = ("prefetch_factor", "timeout", "persistent_workers", "multiprocessing_context")
        workers |= {name: getattr(data, name) for name in (*names, "worker_init_fn")}
    if data.batch_size is None:
        batches = _JoinedBatchSampler(data.batch_sampler, times)
        return run.loader(
            data.dataset, batch_sampler=batches, collate_fn=data.collate_fn, **workers
        )
    together: DataLoader[Any] = DataLoader(
        data.dataset,
        batch_size=data.batch_size * times,
        sampler=None if isinstance(data.dataset, IterableDataset) else data.sampler,
        drop_last=data.drop_last and not complete,
        collate_fn=data.collate_fn,
        **workers,
    )
    return run.loader(together)
