"""Check of the arguments of `Run.loader`; construction of the source of this rank's microbatches."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from lockstep.engine.data.description import Description
from lockstep.engine.data.fetch import Collate, choose
from lockstep.engine.data.orders import (
    Batches,
    DatasetOrder,
    FixedSize,
    OrderSource,
    SampledBatches,
    SamplerOrder,
    check_sampler,
)
from lockstep.engine.data.sources import MapSource, Source, Split, StreamSource, Workers
from lockstep.errors import LoaderError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """Settings of a loader, as in `Run.loader`.

    `LoaderError` is raised when an object with invalid settings is created.
    """

    batch_size: int | None = None
    shuffle: bool = False
    sampler: Any = None
    batch_sampler: Any = None
    drop_last: bool = False
    collate: Collate | None = None
    workers: Workers = field(default_factory=Workers)

    def __post_init__(self) -> None:
        if self.batch_sampler is not None:
            self._check_alone()
        elif not isinstance(self.batch_size, int) or self.batch_size < 1:
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

    @property
    def any_sampler(self) -> Any:
        """The script's sampler or batch sampler; `None` for the loader's own order."""
        return self.batch_sampler if self.sampler is None else self.sampler

    def _check_alone(self) -> None:
        names = ("batch_size", "shuffle", "sampler", "drop_last")
        given = [name for name in names if getattr(self, name) not in (None, False)]
        if given:
            raise LoaderError(
                f"batch_sampler and {', '.join(given)}; expected one of the two: a batch sampler says "
                "which samples make a global batch, and in which order",
                hint=f"leave out {', '.join(given)}",
            )


#: Names of settings that are passed on to torch's DataLoader.
_WORKER_SETTINGS = {
    *("in_order", "multiprocessing_context", "persistent_workers", "pin_memory"),
    *("pin_memory_device", "prefetch_factor", "timeout", "worker_init_fn"),
}


def build(dataset: Any, settings: LoaderSettings, replicas: int, block: range, seed: int) -> Source:
    """Return a source of this rank's microbatches of a dataset.

    `replicas`: number of replicas of the run. `block`: the replicas that this rank computes. `seed`: the
    run's seed.

    Raises:
        LoaderError: if the dataset can't be split over the replicas.
    """
    if settings.batch_size is not None and settings.batch_size < replicas:
        raise LoaderError(
            f"a global batch of {settings.batch_size} for {replicas} replicas; "
            "expected at least one sample per replica",
            hint=f"raise batch_size to {replicas} or more, or lower replicas",
        )
    split = Split(replicas, block)
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
        _batches(dataset, settings, seed),
        split,
        settings.workers,
        Description(dataset, settings.any_sampler),
    )
    if len(source) == 0:
        size = settings.batch_size or type(settings.batch_sampler).__name__
        raise LoaderError(
            f"{type(dataset).__name__} has {len(dataset)} samples, which makes no batch of "
            f"{size}{' with drop_last=True' if settings.drop_last else ''}",
            hint="check the path and the split of the data",
        )
    return source


def _batches(dataset: Sized, settings: LoaderSettings, seed: int) -> Batches:
    if settings.batch_size is None:
        check_sampler(settings.batch_sampler, "batch sampler")
        _check_whole(getattr(settings.batch_sampler, "sampler", None))
        return SampledBatches(settings.batch_sampler, seed)
    orders: OrderSource = DatasetOrder(len(dataset), settings.shuffle, seed)
    if settings.sampler is not None:
        check_sampler(settings.sampler)
        orders = SamplerOrder(settings.sampler, seed)
    return FixedSize(orders, settings.batch_size, settings.drop_last)


def _build_stream(
    dataset: IterableDataset[Any], settings: LoaderSettings, split: Split, seed: int
) -> StreamSource:
    if settings.shuffle or settings.sampler is not None or settings.batch_size is None:
        raise LoaderError(
            f"{type(dataset).__name__} is a stream, which has no order to choose",
            hint="shuffle inside the dataset, and pass batch_size, without shuffle and a sampler",
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
        batch_size=settings.batch_size,
        seed=seed,
        drop_last=settings.drop_last,
    )


def adopt(loader: DataLoader[Any]) -> tuple[Any, LoaderSettings]:
    """Return the dataset and the settings of a DataLoader, for a loader with the same batches.

    The DataLoader's batches become global batches.

    Raises:
        LoaderError: if the DataLoader's batches can't be split over replicas.
    """
    is_stream = isinstance(loader.dataset, IterableDataset)
    if not loader.batch_size and (is_stream or loader.batch_sampler is None):
        raise LoaderError(
            f"the DataLoader over {type(loader.dataset).__name__} has batch_size=None; expected batch_size "
            "or a batch sampler, which say what a global batch is",
            hint="pass the dataset itself with batch_size= or batch_sampler=",
        )
    names = ("prefetch_factor", "timeout", "worker_init_fn", "multiprocessing_context")
    own = {name: getattr(loader, name) for name in (*names, "persistent_workers")}
    count = loader.num_workers
    settings = LoaderSettings(
        batch_size=loader.batch_size,
        batch_sampler=None if loader.batch_size else loader.batch_sampler,
        drop_last=loader.drop_last,
        collate=loader.collate_fn,
        workers=Workers(count, loader.pin_memory, own if count else {}),
    )
    if is_stream or settings.batch_sampler is not None:
        return loader.dataset, settings
    return loader.dataset, replace(settings, **_order_of(loader.sampler, loader.dataset))


def _order_of(sampler: Any, dataset: Any) -> dict[str, Any]:
    kind = type(sampler)
    if kind is SequentialSampler and sampler.data_source is dataset:
        return {"shuffle": False}
    is_random = kind is RandomSampler and sampler.data_source is dataset
    if is_random and not sampler.replacement and sampler._num_samples is None:
        return {"shuffle": True}
    if kind is DistributedSampler and sampler.dataset is dataset:
        return {"shuffle": sampler.shuffle}  # `Loader` itself divides samples over ranks
    _check_whole(sampler)
    return {"sampler": sampler}


def _check_whole(sampler: Any) -> None:
    """Raise `LoaderError` if `sampler` is a DistributedSampler.

    It would yield only one rank's part of the data.
    """
    if isinstance(sampler, DistributedSampler):
        raise LoaderError(
            f"the sampler {type(sampler).__name__} yields one rank's part of the data; "
            "expected an order of the whole data",
            hint="leave the split over ranks to run.loader, and pass the order alone",
        )
