"""Making the loaders of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from lockstep.data.build import LoaderSettings, adopt, build, check_nothing_beside
from lockstep.data.fetch import Collate
from lockstep.data.loader import Loader
from lockstep.data.sources import Workers
from lockstep.errors import LoaderError
from lockstep.training.session import Session


class Loaders:
    """The loaders of a run.

    Args:
        session: the run's session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def make(self, data: Any, asked: dict[str, Any]) -> Loader:
        """Return a loader of `data`, a dataset or a DataLoader; `asked` is what `Run.loader` was given.

        Raises:
            LoaderError: if the data cannot be split as asked.
        """
        if isinstance(data, DataLoader):
            check_nothing_beside(asked)
            return self._add(*adopt(data))
        if asked["batch_size"] is None:
            raise LoaderError("batch_size is missing; expected the samples of a global batch")
        return self._add(data, self._read(**asked))

    def _read(
        self,
        *,
        batch_size: int,
        shuffle: bool,
        sampler: Any,
        drop_last: bool,
        collate_fn: Collate | None,
        num_workers: int,
        **workers: Any,
    ) -> LoaderSettings:
        pinned = workers.pop("pin_memory", self._session.device.type == "cuda")
        return LoaderSettings(
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            drop_last=drop_last,
            collate=collate_fn,
            workers=Workers(num_workers, pinned, workers),
        )

    def _add(self, dataset: Any, settings: LoaderSettings) -> Loader:
        session = self._session
        settings = replace(settings, workers=replace(settings.workers, threads=session.threads))
        source = build(
            dataset, settings, session.replicas, session.formation.block, session.settings.seed
        )
        number = session.loop.new_loader()
        loader = Loader(
            source,
            session.loop,
            number=number,
            batch_size=settings.batch_size,
            device=None if session.device.type == "cpu" else session.device,
            compare=session.same_data.check_of(number),
            measure=session.record.pace.data.over,
        )
        session.loader_made(loader, dataset, settings)
        return loader
