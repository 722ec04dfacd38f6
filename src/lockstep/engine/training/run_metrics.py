"""`RunMetrics`, a base class of `lockstep.Run`: metrics over the samples of all ranks, and barriers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from lockstep.engine.data.loader import GlobalBatch
from lockstep.engine.training.metrics import Item, Value
from lockstep.engine.training.run_properties import RunProperties


class RunMetrics(RunProperties):
    """Base class of `lockstep.Run` with its metrics over the samples of all ranks, and its barriers."""

    def mean(self, items: Iterable[Item | Mapping[str, Item]]) -> Any:
        """Return the mean of `items` over all samples of all ranks.

        Args:
            items: a generator over a loader, with one item per microbatch: the mean over the microbatch
                (shape `()`), or one value per sample (shape `(samples, …)`), or a pair of a mean and the
                number of its elements, as `(loss, tokens)`; or a mapping from names to such items.

        Returns:
            A float, the same on every rank and layout; a dictionary of floats for mappings.

        Raises:
            StepError: inside a microbatch, with several replicas; or if there are no samples.
        """
        return self._session.metrics.mean(items)

    def sum(self, items: Iterable[Value | Mapping[str, Value]], *, per_sample: bool = True) -> Any:
        """Return the sum of `items` over all samples of all ranks, exact for integers.

        Args:
            items: a generator over a loader, with one tensor or number per microbatch, or a mapping.
            per_sample: whether items have shape `(samples, …)`; the sum is over all dimensions. If not,
                an item is the microbatch's sum, of any shape, such as a confusion matrix; the result has
                that shape.
        """
        return self._session.metrics.sum(items, per_sample=per_sample)

    def gather(self, items: Iterable[torch.Tensor], pad: float | None = None) -> torch.Tensor:
        """Return one row per sample of the data, in dataset order, on every rank.

        Args:
            items: a generator over a loader, with one tensor of shape `(samples, …)` per microbatch.
            pad: value that fills shorter rows up to the longest, such as those of padded sequences; by
                default all rows have one shape.
        """
        return self._session.metrics.gather(items, pad)

    def all_gather(
        self, function: Callable[[Any], torch.Tensor], batch: GlobalBatch
    ) -> torch.Tensor:
        """Return one row per sample of a global batch, in the order of its replicas, on every rank.

        It serves losses over the whole batch, such as those with in-batch negatives. The next iteration
        over the batch draws the same random numbers; a microbatch has its own rows at `run.batch_rows`.

        Args:
            function: returns a tensor of shape `(samples, …)` for a microbatch of `batch`; it is called
                without gradients.
            batch: a global batch of `run.batches`, outside of an iteration over it.

        Raises:
            StepError: inside a microbatch, with several replicas; or for a result of a different shape.
        """
        return self._session.metrics.all_gather(function, batch).to(self.device)

    def main_process_first(self) -> AbstractContextManager[None]:
        """Return a context whose body runs on rank 0 first, then on one rank per node, then on the rest."""
        self._loop.require_common_point("run.main_process_first", of_models=False)
        return self._session.rank_order.first()

    def barrier(self) -> None:
        """Wait until all ranks have called `run.barrier`."""
        self._loop.require_common_point("run.barrier", of_models=False)
        self._session.barrier("run.barrier")
