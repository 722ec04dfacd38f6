"""Order of an epoch: that of the dataset, a keyed shuffle, or the user's sampler."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import BatchSampler

from lockstep.data.randomness import set_key
from lockstep.errors import LoaderError
from lockstep.layout import keys
from lockstep.layout.permutation import Listed, Order, Sequential, Shuffled


class OrderSource(Protocol):
    """Gives each loop over the data its order."""

    @property
    def name(self) -> str:
        """What kind of order it is."""

    def __len__(self) -> int:
        """Number of positions in an order."""

    def order(self, loader: int, epoch: int, round_: int) -> Order:
        """Return the order of one loop over the data."""


@dataclass(frozen=True, slots=True)
class DatasetOrder:
    """The dataset's own order, or a keyed shuffle of it."""

    length: int
    shuffle: bool
    seed: int

    @property
    def name(self) -> str:
        """What kind of order it is."""
        return "shuffled" if self.shuffle else "sequential"

    def __len__(self) -> int:
        return self.length

    def order(self, loader: int, epoch: int, round_: int) -> Order:
        """Return the order of one loop over the data, in constant memory."""
        if not self.shuffle:
            return Sequential(self.length)
        return Shuffled(self.length, keys.derive(self.seed, keys.ORDER, loader, epoch, round_))


@dataclass(frozen=True, slots=True)
class SamplerOrder:
    """What a sampler of the user's yields, drawn under the loop's key so that all ranks agree.

    Takes 8 bytes per sample, since a sampler can only be asked for everything at once.
    """

    sampler: Any
    seed: int

    @property
    def name(self) -> str:
        """What kind of order it is: the sampler's class."""
        return type(self.sampler).__name__

    def __len__(self) -> int:
        return len(self.sampler)

    def order(self, loader: int, epoch: int, round_: int) -> Order:
        """Return the order of one loop over the data.

        Raises:
            LoaderError: if the sampler yields another number of indices than its length.
        """
        key = keys.derive(self.seed, keys.ORDER, loader, epoch, round_)
        set_key(key)
        generator = getattr(self.sampler, "generator", None)
        if isinstance(generator, torch.Generator):
            generator.manual_seed(key)
        indices = np.fromiter(self.sampler, dtype=np.int64)
        if len(indices) != len(self):
            raise LoaderError(
                f"the sampler {type(self.sampler).__name__} yielded {len(indices)} indices; "
                f"expected {len(self)}, its length",
                hint="give the sampler a __len__ that holds for every epoch",
            )
        return Listed(indices)


def check_sampler(sampler: object) -> None:
    """Refuse a sampler without a length: the ranks could not know when the epoch ends.

    Raises:
        LoaderError: if it has no length, cannot be iterated, or yields batches.
    """
    if isinstance(sampler, BatchSampler):
        raise LoaderError(
            f"the sampler {type(sampler).__name__} yields batches; expected indices",
            hint="pass the sampler inside it, and batch_size for the global batch",
        )
    if not isinstance(sampler, Sized) or not isinstance(sampler, Iterable):
        raise LoaderError(
            f"the sampler {type(sampler).__name__} has no length or cannot be iterated; "
            "expected both",
            hint="give it __len__ and __iter__, or pass shuffle=True",
        )
