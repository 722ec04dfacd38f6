"""`Loaders`: makes the loaders of a run from datasets or DataLoaders."""

from __future__ import annotations

import weakref
from dataclasses import replace
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from lockstep.engine.data.build import LoaderSettings, adopt, build
from lockstep.engine.data.loader import Loader
from lockstep.engine.data.sources import Workers
from lockstep.engine.training.context import Context
from lockstep.engine.training.divergence import SameData
from lockstep.engine.training.loop import Loop
from lockstep.errors import LoaderError
from lockstep.world import accelerator


class Loaders:
    """Makes the loaders of a run, and closes them at its end."""

    def __init__(self, context: Context, loop: Loop) -> None:
        self._context, self._loop = context, loop
        self._same_data = SameData(
            context.rendezvous,
            exact=context.settings.exact,
            audits=context.settings.audit != "off",
        )
        # Weak references, so that loaders that a script makes for one epoch are freed.
        self.made: weakref.WeakSet[Loader] = weakref.WeakSet()

    def close(self) -> None:
        """Close all loaders and end their DataLoader worker processes."""
        for loader in self.made:
            loader.close()

    def make(self, data: Any, asked: dict[str, Any]) -> Loader:
        """Return a loader of `data`, a dataset or a DataLoader; `asked` are the arguments of `run.loader`.

        Raises:
            LoaderError: if the data cannot be split over the replicas with these arguments.
        """
        if isinstance(data, DataLoader):
            if given := [name for name, value in asked.items() if value]:
                raise LoaderError(
                    f"a DataLoader and {', '.join(given)}; expected one of the two",
                    hint="the DataLoader's own settings are adopted",
                )
            return self._add(*adopt(data))
        if asked["batch_size"] is None and asked["batch_sampler"] is None:
            raise LoaderError("batch_size is missing; expected the samples of a global batch")
        named = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
        others = {name: value for name, value in asked.items() if name not in named}
        collate, number = others.pop("collate_fn"), others.pop("num_workers")
        pinned = others.pop("pin_memory", accelerator.holds(self._context.device))
        own = {name: asked[name] for name in named}
        return self._add(
            data, LoaderSettings(**own, collate=collate, workers=Workers(number, pinned, others))
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
            compare=partial(self._same_data.compare, number) if context.replicas > 1 else None,
            measure=context.record.pace.data.over,
            dataset=dataset,
            sampler=settings.any_sampler,
        )
        self.made.add(loader)
        context.record.loader_made(loader, dataset, settings)
        return loader
