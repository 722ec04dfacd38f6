"""Orders of the samples in a loop, and division of an order into global batches.

A script's batch sampler may make both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler

from lockstep.engine.data.microbatch import Batching, LoopKey
from lockstep.engine.data.randomness import set_key
from lockstep.engine.layout import keys
from lockstep.engine.layout.permutation import (
    ArrayOrder,
    Indices,
    Order,
    SequentialOrder,
    ShuffledOrder,
)
from lockstep.errors import LoaderError


@dataclass(frozen=True, slots=True)
class DatasetOrder:
    """Orders of the samples of a dataset: the dataset's own order, or random permutations.

    With `shuffle` each loop has a different permutation, which follows from `seed`.
    """

    length: int
    shuffle: bool
    seed: int

    @property
    def name(self) -> str:
        """Name of the kind of order, `shuffled` or `sequential`, which saved states contain."""
        return "shuffled" if self.shuffle else "sequential"

    def __len__(self) -> int:
        return self.length

    def order(self, loop: LoopKey) -> Order:
        """Return the order of samples in `loop`; it takes constant memory."""
        if not self.shuffle:
            return SequentialOrder(self.length)
        return ShuffledOrder(self.length, keys.derive(self.seed, keys.ORDER, *loop))


@dataclass(frozen=True, slots=True)
class SamplerOrder:
    """Orders in which the script's sampler yields samples, after equal seeding on all ranks.

    An order takes 8 bytes of memory per sample.
    """

    sampler: Any
    seed: int

    @property
    def name(self) -> str:
        """Class name of the sampler, which saved states contain."""
        return type(self.sampler).__name__

    def __len__(self) -> int:
        return len(self.sampler)

    def order(self, loop: LoopKey) -> Order:
        """Return the order of samples in `loop`, as the sampler yields them.

        Raises:
            LoaderError: if the sampler yields a different number of indices than its length.
        """
        _seed(self.sampler, keys.derive(self.seed, keys.ORDER, *loop))
        indices = np.fromiter(self.sampler, dtype=np.int64)
        if len(indices) != len(self):
            raise LoaderError(
                f"the sampler {type(self.sampler).__name__} yielded {len(indices)} indices; "
                f"expected {len(self)}, its length",
                hint="give the sampler a __len__ that holds for every epoch",
            )
        return ArrayOrder(indices)


OrderSource = DatasetOrder | SamplerOrder


def _seed(sampler: Any, key: int) -> None:
    """Seed the global random generators, the generator of `sampler`, and that of its inner sampler.

    A batch sampler has an inner sampler as its attribute `sampler`.
    """
    set_key(key)
    for part in (sampler, getattr(sampler, "sampler", None)):
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(key)


# --- batches ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoopBatches:
    """The global batches of one loop: the order of the samples, and each batch's first position."""

    order: Order
    start: Callable[[int], int]  # from a batch's number to the position of its first sample


@dataclass(frozen=True, slots=True)
class FixedSize:
    """Divides the samples of a loop into global batches of `size` samples.

    A shorter last batch is kept, or with `drop_last` left out.
    """

    orders: OrderSource
    size: int
    drop_last: bool

    def __len__(self) -> int:
        length = len(self.orders)
        return length // self.size if self.drop_last else -(-length // self.size)

    def batching(self, indices: str | None) -> Batching:
        """Return the settings that decide which samples each batch has.

        `indices`: a checksum of the dataset's indices, which is one of these settings; `None` without any.
        """
        return Batching(
            batch_size=self.size,
            samples=len(self.orders),
            order=self.orders.name,
            drop_last=self.drop_last,
            indices=indices,
        )

    def draw(self, loop: LoopKey) -> LoopBatches:
        """Return the global batches of `loop`."""
        order, size = self.orders.order(loop), self.size
        length = len(order)
        return LoopBatches(order, lambda step: min(step * size, length))


@dataclass(frozen=True, slots=True)
class SampledBatches:
    """Takes global batches from the script's batch sampler, after equal seeding on all ranks."""

    sampler: Any
    seed: int

    def __len__(self) -> int:
        return len(self.sampler)

    def batching(self, indices: str | None) -> Batching:
        """Return the settings that decide which samples each batch has.

        `indices`: a checksum of the dataset's indices, which is one of these settings; `None` without any.
        """
        return Batching(
            batch_size=None,
            samples=None,
            order=type(self.sampler).__name__,
            drop_last=False,
            indices=indices,
            count=len(self),
        )

    def draw(self, loop: LoopKey) -> LoopBatches:
        """Return the global batches of `loop`, as the batch sampler yields them.

        Raises:
            LoaderError: if the number of batches is not the sampler's length, or a batch is empty.
        """
        _seed(self.sampler, keys.derive(self.seed, keys.ORDER, *loop))
        name = type(self.sampler).__name__
        batches = [_indices(batch, name) for batch in self.sampler]
        if len(batches) != len(self):
            raise LoaderError(
                f"the batch sampler {name} yielded {len(batches)} batches; expected {len(self)}, "
                "its length",
                hint="give it a __len__ that holds for every epoch",
            )
        starts = np.cumsum([0, *map(len, batches)])
        return LoopBatches(ArrayOrder(np.concatenate(batches)), lambda step: int(starts[step]))


Batches = FixedSize | SampledBatches


def _indices(batch: Any, sampler: str) -> Indices:
    if not isinstance(batch, Iterable) or isinstance(batch, str):
        what = type(batch).__name__
        raise LoaderError(
            f"the batch sampler {sampler} yielded a value of type {what}; expected the indices of a batch",
            hint="pass a sampler of indices as sampler=, with batch_size=",
        )
    indices = np.fromiter(batch, dtype=np.int64)
    if not len(indices):
        raise LoaderError(
            f"the batch sampler {sampler} yielded a batch without samples; expected at least one",
            hint="leave empty batches out, and out of its length",
        )
    return indices


def check_sampler(sampler: object, kind: str = "sampler") -> None:
    """Raise `LoaderError` for a sampler without `__len__` or `__iter__`.

    `kind`: "sampler" or "batch sampler", for the message. For "sampler" the error is raised for a torch
    `BatchSampler`, too.
    """
    if isinstance(sampler, BatchSampler) and kind == "sampler":
        raise LoaderError(
            f"the sampler {type(sampler).__name__} yields batches; expected indices",
            hint="pass it as batch_sampler=, without batch_size",
        )
    if not isinstance(sampler, Sized) or not isinstance(sampler, Iterable):
        raise LoaderError(
            f"the {kind} {type(sampler).__name__} has no length or cannot be iterated; "
            "expected both",
            hint="give it __len__ and __iter__, or pass batch_size= and shuffle=True",
        )
