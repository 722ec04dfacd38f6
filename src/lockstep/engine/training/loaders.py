"""Making the loaders of a run."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from lockstep.engine.data.build import LoaderSettings, adopt, build, check_nothing_beside
from lockstep.engine.data.fetch import Collate
from lockstep.engine.data.loader import Loader
from lockstep.engine.data.sources import Workers
from lockstep.engine.training.context import Context
from lockstep.engine.training.divergence import SameData
from lockstep.engine.training.loop import Loop
from lockstep.errors import LoaderError
from lockstep.world import accelerator


class Loaders:
    """The loaders of a run.

    Args:
        context: of the run.
        loop: where the run stands.

    Attributes:
        made: the loaders that the script has.
    """

    def __init__(self, context: Context, loop: Loop) -> None:
        self._context, self._loop = context, loop
        self._same_data = SameData(
            context.rendezvous,
            exact=context.settings.exact,
            replicas=context.replicas,
            audits=context.settings.audit != "off",
        )
        # Weak, so that a script may make a loader per epoch and let it go.
        self.made: weakref.WeakSet[Loader] = weakref.WeakSet()

    def close(self) -> None:
        """End what the loaders still run."""
        for loader in self.made:
            loader.close()

    def make(self, data: Any, asked: dict[str, Any]) -> Loader:
        """Return a loader of `data`, a dataset or a DataLoader; `asked` is what `Run.loader` was given.

        Raises:
            LoaderError: if the data cannot be split as asked.
        """
        if isinstance(data, DataLoader):
            check_nothing_beside(asked)
            return self._add(*adopt(data))
        if asked["batch_size"] is None and asked["batch_sampler"] is None:
            raise LoaderError("batch_size is missing; expected the samples of a global batch")
        return self._add(data, self._read(**asked))

    def _read(
        self,
        *,
        batch_size: int | None,
        shuffle: bool,
        sampler: Any,
        batch_sampler: Any,
        drop_last: bool,
        collate_fn: Collate | None,
        num_workers: int,
        **workers: Any,
    ) -> LoaderSettings:
        pinned = workers.pop("pin_memory", accelerator.holds(self._context.device))
        return LoaderSettings(
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            drop_last=drop_last,
            collate=collate_fn,
            workers=Workers(num_workers, pinned, workers),
        )

    def _add(self, dataset: Any, settings: LoaderSettings) -> Loader:
        context = self._context
        settings = replace(settings, workers=replace(settings.workers, threads=context.threads))
        seed = context.settings.seed
        source = build(dataset, settings, context.replicas, context.dims.block, seed)
        number = self._loop.progress.new_loader()
        loader = Loader(
            source,
            self._loop,
            number=number,
            batch_size=settings.batch_size,
            device=None if context.device.type == "cpu" else context.device,
            compare=self._same_data.check_of(number),
            measure=context.record.pace.data.over,
            dataset=dataset,
            sampler=settings.sampler or settings.batch_sampler,
        )
        self.made.add(loader)
        context.record.loader_made(loader, dataset, settings)
        return loader
