"""Arguments of `Run.loader` to a source of microbatches; data that cannot be split is refused."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from lockstep.data.description import Description
from lockstep.data.fetch import Collate, choose
from lockstep.data.orders import DatasetOrder, OrderSource, SamplerOrder, check_sampler
from lockstep.data.sources import MapSource, Source, Split, StreamSource, Workers
from lockstep.errors import LoaderError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """What a loader is asked to do; see `Run.loader`.

    Raises:
        LoaderError: if a setting makes no sense by itself.
    """

    batch_size: int
    shuffle: bool = False
    sampler: Any = None
    drop_last: bool = False
    collate: Collate | None = None
    workers: Workers = field(default_factory=Workers)

    def __post_init__(self) -> None:
        if not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise LoaderError(
                f"batch_size is {self.batch_size!r}; expected the number of samples in a global "
                "batch, at least 1"
            )
        unknown = self.workers.settings.keys() - _WORKER_SETTINGS
        if unknown:
            raise LoaderError(
                f"a loader has no setting {', '.join(sorted(unknown))}",
                hint=f"besides its own it takes {', '.join(sorted(_WORKER_SETTINGS))}",
            )
        if self.sampler is not None and self.shuffle:
            raise LoaderError(
                "shuffle=True and a sampler; expected at most one of them to say the order",
                hint="drop shuffle=True: the sampler decides",
            )


#: What goes to the DataLoader as it is.
_WORKER_SETTINGS = frozenset(
    {
        "in_order",
        "multiprocessing_context",
        "persistent_workers",
        "pin_memory",
        "pin_memory_device",
        "prefetch_factor",
        "timeout",
        "worker_init_fn",
    }
)


def check_nothing_beside(asked: dict[str, Any]) -> None:
    """Refuse settings beside a DataLoader, which has its own.

    Raises:
        LoaderError: naming them.
    """
    given = [name for name, value in asked.items() if value]
    if given:
        raise LoaderError(
            f"a DataLoader and {', '.join(given)}; expected one of the two",
            hint="the DataLoader's own settings are adopted",
        )


def build(dataset: Any, settings: LoaderSettings, replicas: int, block: range, seed: int) -> Source:
    """Return the source for a dataset and its settings.

    Raises:
        LoaderError: if the dataset can't be split over the replicas.
    """
    if settings.batch_size < replicas:
        raise LoaderError(
            f"a global batch of {settings.batch_size} for {replicas} replicas; "
            "expected at least one sample per replica",
            hint=f"raise batch_size to {replicas} or more, or lower replicas",
        )
    split = Split(settings.batch_size, replicas, block)
    if isinstance(dataset, IterableDataset):
        return _build_stream(dataset, settings, split, seed)
    return _build_map(dataset, settings, split, seed)


def _build_map(dataset: Any, settings: LoaderSettings, split: Split, seed: int) -> MapSource:
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise LoaderError(
            f"{type(dataset).__name__} is no dataset: expected __len__ and __getitem__, "
            "an IterableDataset or a DataLoader",
            hint="wrap an iterator in a torch.utils.data.IterableDataset",
        )
    source = MapSource(
        choose(dataset, settings.collate, seed),
        _order_source(dataset, settings, seed),
        split,
        settings.workers,
        Description(dataset, settings.sampler),
        drop_last=settings.drop_last,
    )
    if len(source) == 0:
        raise LoaderError(
            f"{type(dataset).__name__} has {len(dataset)} samples, which makes no batch of "
            f"{split.batch_size}{' with drop_last=True' if settings.drop_last else ''}",
            hint="check the path and the split of the data",
        )
    return source


def _order_source(dataset: Sized, settings: LoaderSettings, seed: int) -> OrderSource:
    if settings.sampler is not None:
        check_sampler(settings.sampler)
        return SamplerOrder(settings.sampler, seed)
    return DatasetOrder(len(dataset), settings.shuffle, seed)


def _build_stream(
    dataset: IterableDataset[Any], settings: LoaderSettings, split: Split, seed: int
) -> StreamSource:
    if settings.shuffle or settings.sampler is not None:
        raise LoaderError(
            f"{type(dataset).__name__} is a stream, which has no order to choose",
            hint="shuffle inside the dataset, and drop shuffle and sampler",
        )
    if settings.workers.count > 1:
        raise LoaderError(
            f"{settings.workers.count} workers for the stream {type(dataset).__name__}: each would "
            "read the whole stream, so that items come several times; expected 0 or 1",
            hint="num_workers=1, or a map-style dataset",
        )
    return StreamSource(
        dataset,
        settings.collate or default_collate,
        split,
        settings.workers,
        seed=seed,
        drop_last=settings.drop_last,
    )


def adopt(loader: DataLoader[Any]) -> tuple[Any, LoaderSettings]:
    """Return the dataset and the settings of a DataLoader; its batch size becomes the global one.

    Raises:
        LoaderError: if it makes its batches in a way that can't be split over replicas.
    """
    is_stream = isinstance(loader.dataset, IterableDataset)
    if not loader.batch_size or not (is_stream or type(loader.batch_sampler) is BatchSampler):
        raise LoaderError(
            f"the DataLoader over {type(loader.dataset).__name__} makes its batches by "
            f"{type(loader.batch_sampler).__name__}; expected batch_size and, if any, a sampler",
            hint="pass the dataset itself with batch_size= and sampler=",
        )
    settings = LoaderSettings(
        batch_size=loader.batch_size,
        drop_last=loader.drop_last,
        collate=loader.collate_fn,
        workers=_workers_of(loader),
    )
    if is_stream:
        return loader.dataset, settings
    return loader.dataset, replace(settings, **_order_of(loader.sampler, loader.dataset))


def _order_of(sampler: Any, dataset: Any) -> dict[str, Any]:
    kind = type(sampler)
    if kind is SequentialSampler and sampler.data_source is dataset:
        return {"shuffle": False}
    if kind is RandomSampler and sampler.data_source is dataset and _shuffles(sampler):
        return {"shuffle": True}
    if kind is DistributedSampler and sampler.dataset is dataset:
        return {"shuffle": sampler.shuffle}  # the split over ranks is this loader's own work
    if isinstance(sampler, DistributedSampler):
        raise LoaderError(
            f"the sampler {kind.__name__} yields one rank's part of the data; "
            "expected an order of the whole data",
            hint="leave the split over ranks to run.loader, and pass the order alone",
        )
    return {"sampler": sampler}


def _shuffles(sampler: RandomSampler) -> bool:
    return not sampler.replacement and sampler._num_samples is None


def _workers_of(loader: DataLoader[Any]) -> Workers:
    if loader.num_workers == 0:
        return Workers(pin_memory=loader.pin_memory)
    names = ("prefetch_factor", "timeout", "worker_init_fn", "multiprocessing_context")
    settings = {name: getattr(loader, name) for name in names}
    settings["persistent_workers"] = loader.persistent_workers
    return Workers(loader.num_workers, loader.pin_memory, settings)
