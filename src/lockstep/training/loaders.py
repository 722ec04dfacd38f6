"""Making the loaders of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lockstep.data.build import LoaderSettings, build
from lockstep.data.loader import Loader
from lockstep.training.session import Session


class Loaders:
    """The loaders of a run.

    Args:
        session: the run's session.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def add(self, dataset: Any, settings: LoaderSettings) -> Loader:
        """Return a loader of `dataset`.

        Raises:
            LoaderError: if the data cannot be split as asked.
        """
        session = self._session
        settings = replace(settings, workers=replace(settings.workers, threads=session.threads))
        source = build(dataset, settings, session.replicas, session.block, session.settings.seed)
        loader = Loader(
            source,
            session.loop,
            number=session.loop.new_loader(),
            batch_size=settings.batch_size,
            device=None if session.device.type == "cpu" else session.device,
        )
        session.loader_made(loader, dataset, settings)
        return loader
