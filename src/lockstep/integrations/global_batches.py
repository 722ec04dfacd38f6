"""`GlobalBatches`: yields global batches of a run's loader to the fit loop of Lightning's Trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lockstep.engine.data.loader import GlobalBatch
from lockstep.integrations.loaders import global_loader
from lockstep.run import Run

#: Number of epochs for `run.epochs` if the Trainer has no `max_epochs`.
_UNLIMITED = 1 << 20


class GlobalBatches:
    """Iterator over global batches for Lightning's fit loop; starts at the loop's current epoch and batch.

    After a restart, or with a loaded checkpoint, it leaves out batches that were trained on before.

    Attributes:
        restore: called before the first batch after a restart, to set the fit loop's counters again.
    """

    def __init__(self, trainer: Any, run: Run, data: Any) -> None:
        self._trainer, self._run, self._data = trainer, run, data
        self._loader = global_loader(run, data, 1)
        self._epochs: Iterator[int] = iter(())
        self._epoch = -1
        self._batches: Any = None
        self._current: GlobalBatch | None = None
        self._ahead: GlobalBatch | None = None  # the first batch after a restart
        self.restore: Callable[[], None] | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._data, name)

    def __len__(self) -> int:
        return len(self._loader)

    def is_current(self, batch: Any) -> bool:
        """Whether `batch` is the global batch that was yielded last."""
        return batch is self._current

    def begin(self) -> None:
        """Call `run.epochs` with the Trainer's `max_epochs`, or with a very large number if it has none."""
        limit = self._trainer.max_epochs
        if limit in (None, -1):
            limit = _UNLIMITED
        self._epochs = self._run.epochs(limit)

    def resume(self) -> None:
        """Iterate over epochs and batches up to where the run stopped, which restores the run's state.

        The next batch after that is kept, and `__next__` returns it first.
        """
        self._ahead = self._next()

    def end(self) -> None:
        """End the run's loops over batches and epochs."""
        self._leave()
        next(self._epochs, None)
        self._epochs.close()  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        return self

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dictionary: the counters of the fit loop determine the next batch."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the counters of the fit loop determine the next batch."""

    def __next__(self) -> Any:
        if self.restore is not None:
            self.restore()
            self.restore = None
            fit = self._trainer.fit_loop
            fit._data_fetcher.fetched = fit.epoch_loop.batch_progress.current.ready
        self._current, self._ahead = self._ahead or self._next(), None
        if self._current is None:
            raise StopIteration
        return self._current

    def _next(self) -> GlobalBatch | None:
        fit, run = self._trainer.fit_loop, self._run
        was_replaying = run.is_replaying
        while True:
            if self._batches is None or self._epoch < self._trainer.current_epoch:
                self._leave()
                if was_replaying and not run.is_replaying and fit.done:
                    return None
                self._epoch = next(self._epochs, -1)
                if self._epoch < 0:
                    return None
                self._batches = run.batches(self._loader)
            batch: GlobalBatch | None = next(self._batches, None)
            if batch is None:
                self._batches = None
                if self._epoch >= self._trainer.current_epoch and not run.is_replaying:
                    return None
            elif not run.is_replaying and (self._epoch, batch.index) == (
                self._trainer.current_epoch,
                fit.epoch_loop.batch_progress.current.ready,
            ):
                return batch

    def _leave(self) -> None:
        """End the loop over the current epoch's batches."""
        if self._batches is not None:
            next(self._batches, None)  # ends the batch that was trained on last
            self._batches.close()
            self._batches = None
