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
    """Request for the samples of one microbatch.

    Attributes:
        indices: dataset indices of the samples.
        numbers: `Microbatch.numbers`, from which random seeds are derived.
    """

    indices: Indices
    numbers: tuple[int, int, int, int, int]


class CheckRequest(FetchRequest):
    """Request for samples that are compared with those of other ranks; they are not collated."""


@dataclass(frozen=True, slots=True)
class FetchTensors:
    """Callable that returns microbatches of a TensorDataset, by indexing the dataset's tensors.

    No random numbers are drawn. `subset`: indices of the samples of a `Subset`; `None` for all samples.
    """

    tensors: tuple[torch.Tensor, ...]
    subset: torch.Tensor | None

    def samples(self, request: FetchRequest) -> list[torch.Tensor]:
        """Return the samples of `request`, as one tensor for each tensor of the dataset.

        Each has the shape `(samples, …)`.
        """
        index = torch.from_numpy(request.indices)
        if self.subset is not None:
            index = self.subset[index]
        # `index_select` is several times cheaper than `tensor[index]` on small batches.
        return [
            tensor.index_select(
                0, index if tensor.device == index.device else index.to(tensor.device)
            )
            for tensor in self.tensors
        ]

    __call__ = samples


@dataclass(frozen=True, slots=True)
class FetchBatch:
    """Callable that returns microbatches, by one call of the dataset's `__getitems__` for each.

    Random generators are seeded once per microbatch.
    """

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
    """Callable that returns microbatches, whose samples it fetches from the dataset one by one.

    Random generators are seeded before each sample, with a key of the sample.
    """

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
    """Return a `FetchTensors` for a TensorDataset, or a Subset of one; `None` for any other dataset."""
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
    """Whether `dataset` is a Subset whose `__getitems__` only calls `__getitem__` for each sample.

    If so, the samples are fetched one by one, and the random generators are seeded before each.
    """
    while type(dataset) is Subset:
        dataset = dataset.dataset
        if not callable(getattr(dataset, "__getitems__", None)):
            return True
    return False
