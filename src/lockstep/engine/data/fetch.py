"""Fetch the samples of a microbatch, each under its own random key.

Runs in DataLoader workers too: nothing here knows about ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils.data import Subset, TensorDataset
from torch.utils.data import default_collate as torch_default_collate

from lockstep.engine.data.randomness import set_key
from lockstep.engine.layout import keys
from lockstep.engine.layout.permutation import Indices

Collate = Callable[[list[Any]], Any]


class Request(NamedTuple):
    """One microbatch to fetch: the samples, and the numbers that name it among all."""

    indices: Indices
    numbers: tuple[int, int, int, int, int]


class Look(Request):
    """Samples that are to be compared with those of other ranks, and not collated."""


class Fetch(Protocol):
    """How a dataset turns a request into a batch."""

    def __call__(self, request: Request) -> Any:
        """Return the collated samples of `request`."""

    def samples(self, request: Request) -> Any:
        """Return them as the dataset gives them."""


@dataclass(frozen=True, slots=True)
class FetchTensors:
    """Whole batches by indexing: nothing is random and nothing needs collating."""

    tensors: tuple[torch.Tensor, ...]
    subset: torch.Tensor | None

    def samples(self, request: Request) -> list[torch.Tensor]:
        """Return one tensor per tensor of the dataset, each of shape `(samples, …)`."""
        index = torch.from_numpy(request.indices)
        if self.subset is not None:
            index = self.subset[index]
        # `index_select` is several times cheaper than `tensor[index]` on small batches.
        return [tensor.index_select(0, index.to(tensor.device)) for tensor in self.tensors]

    __call__ = samples


@dataclass(frozen=True, slots=True)
class FetchBatch:
    """Whole batches by the dataset's own `__getitems__`, under one key per microbatch."""

    dataset: Any
    collate: Collate
    seed: int

    def __call__(self, request: Request) -> Any:
        """Return the collated samples of `request`."""
        return self.collate(self.samples(request))

    def samples(self, request: Request) -> Any:
        """Return them as the dataset gives them."""
        set_key(keys.derive(self.seed, keys.BATCH, *request.numbers))
        return self.dataset.__getitems__(request.indices.tolist())


@dataclass(frozen=True, slots=True)
class FetchSamples:
    """One sample after the other, each under a key of its own."""

    dataset: Any
    collate: Collate
    seed: int

    def __call__(self, request: Request) -> Any:
        """Return the collated samples of `request`."""
        samples = self.samples(request)
        set_key(keys.derive(self.seed, keys.BATCH, *request.numbers))
        return self.collate(samples)

    def samples(self, request: Request) -> list[Any]:
        """Return them as the dataset gives them."""
        return [self._sample(index, request) for index in request.indices.tolist()]

    def _sample(self, index: int, request: Request) -> Any:
        loader, epoch, round_, _, _ = request.numbers
        set_key(keys.derive(self.seed, keys.SAMPLE, loader, epoch, round_, index))
        try:
            return self.dataset[index]
        except Exception as error:
            error.add_note(f"sample {index} of {type(self.dataset).__name__}")
            raise


def choose(dataset: Any, collate: Collate | None, seed: int) -> Fetch:
    """Return the cheapest way to fetch from `dataset` that gives what `collate` would see."""
    if collate is None or collate is torch_default_collate:
        tensors = _tensors_behind(dataset)
        if tensors is not None:
            return tensors
    collate = collate or torch_default_collate
    if callable(getattr(dataset, "__getitems__", None)) and not _hides_samples(dataset):
        return FetchBatch(dataset, collate, seed)
    return FetchSamples(dataset, collate, seed)


def _tensors_behind(dataset: Any) -> FetchTensors | None:
    """Look through subsets to a plain TensorDataset; a subclass may do anything, so it isn't one."""
    subset: torch.Tensor | None = None
    while type(dataset) is Subset:
        indices = torch.as_tensor(dataset.indices, dtype=torch.int64)
        behind: Any = dataset.dataset
        indices = torch.where(indices < 0, indices + len(behind), indices)
        subset = indices if subset is None else indices[subset]
        dataset = behind
    if type(dataset) is not TensorDataset:
        return None
    return FetchTensors(dataset.tensors, subset)


def _hides_samples(dataset: Any) -> bool:
    """Whether `__getitems__` is only a loop over samples: then each gets its own key instead."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
        if not callable(getattr(dataset, "__getitems__", None)):
            return True
    return False
