"""Fetching of a microbatch's samples, with the random generators set to a key for each sample.

This code also runs in DataLoader workers. It does not use the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import Subset, TensorDataset
from torch.utils.data import default_collate as torch_default_collate

from lockstep.engine.data.randomness import set_key
from lockstep.engine.layout import keys
from lockstep.engine.layout.permutation import Indices

Collate = Callable[[list[Any]], Any]


class FetchRequest(NamedTuple):
    """A microbatch to fetch: dataset indices of its samples, and `Microbatch.numbers` for random seeds."""

    indices: Indices
    numbers: tuple[int, int, int, int, int]


class CheckRequest(FetchRequest):
    """Samples to fetch for a comparison of the dataset with other ranks; they are not collated."""


@dataclass(frozen=True, slots=True)
class FetchTensors:
    """Fetches whole microbatches by indexing the tensors of a TensorDataset, without random numbers."""

    tensors: tuple[torch.Tensor, ...]
    subset: torch.Tensor | None

    def samples(self, request: FetchRequest) -> list[torch.Tensor]:
        """Return the samples, as a tensor of shape `(samples, …)` for each tensor of the dataset."""
        index = torch.from_numpy(request.indices)
        if self.subset is not None:
            index = self.subset[index]
        # `index_select` is several times cheaper than `tensor[index]` on small batches.
        return [tensor.index_select(0, index.to(tensor.device)) for tensor in self.tensors]

    __call__ = samples


@dataclass(frozen=True, slots=True)
class FetchBatch:
    """Fetches a microbatch by one call of the dataset's `__getitems__`, after seeding generators once."""

    dataset: Any
    collate: Collate
    seed: int

    def __call__(self, request: FetchRequest) -> Any:
        """Return the collated samples of `request`."""
        return self.collate(self.samples(request))

    def samples(self, request: FetchRequest) -> Any:
        """Return the samples of `request` from the dataset, not collated."""
        set_key(keys.derive(self.seed, keys.BATCH, *request.numbers))
        return self.dataset.__getitems__(request.indices.tolist())


@dataclass(frozen=True, slots=True)
class FetchSamples:
    """Fetches the samples of a microbatch one by one, each after seeding generators with its own key."""

    dataset: Any
    collate: Collate
    seed: int

    def __call__(self, request: FetchRequest) -> Any:
        """Return the collated samples of `request`."""
        samples = self.samples(request)
        set_key(keys.derive(self.seed, keys.BATCH, *request.numbers))
        return self.collate(samples)

    def samples(self, request: FetchRequest) -> list[Any]:
        """Return the samples of `request` from the dataset, not collated."""
        loader, epoch, round_, _, _ = request.numbers
        samples = []
        for index in request.indices.tolist():
            set_key(keys.derive(self.seed, keys.SAMPLE, loader, epoch, round_, index))
            try:
                samples.append(self.dataset[index])
            except Exception as error:
                error.add_note(f"sample {index} of {type(self.dataset).__name__}")
                raise
        return samples


Fetch = FetchTensors | FetchBatch | FetchSamples


def choose(dataset: Any, collate: Collate | None, seed: int) -> Fetch:
    """Return an object that fetches microbatches of `dataset`, in the fastest way that fits.

    `collate`: makes a batch of samples; torch's by default. `seed`: the run's seed, from which random
    numbers drawn in the dataset follow.
    """
    if collate is None or collate is torch_default_collate:
        tensors = _tensors_behind(dataset)
        if tensors is not None:
            return tensors
    collate = collate or torch_default_collate
    if callable(getattr(dataset, "__getitems__", None)) and not _hides_samples(dataset):
        return FetchBatch(dataset, collate, seed)
    return FetchSamples(dataset, collate, seed)


def _tensors_behind(dataset: Any) -> FetchTensors | None:
    """Return a fetcher for a TensorDataset, also inside of Subsets; `None` for any other dataset."""
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
    """Return whether `dataset` is a Subset whose `__getitems__` only calls `__getitem__` for each sample.

    Its samples are fetched one by one instead, each after seeding the random generators.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
        if not callable(getattr(dataset, "__getitems__", None)):
            return True
    return False
