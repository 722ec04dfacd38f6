"""From indices to a batch: cheaply where it can be, each sample under its own key where it must."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

from lockstep.engine.data.build import LoaderSettings, build
from lockstep.engine.data.fetch import FetchBatch, FetchRequest, FetchSamples, FetchTensors, choose
from lockstep.engine.data.microbatch import LoopKey
from lockstep.engine.data.sources import Workers
from lockstep.engine.layout.replicas import block


def request(*indices: int) -> FetchRequest:
    return FetchRequest(np.array(indices, dtype=np.int64), (0, 0, 0, 0, 0))


@pytest.fixture
def tensors() -> TensorDataset:
    return TensorDataset(torch.randn(9, 3, 2), torch.arange(9), torch.rand(9, dtype=torch.float64))


def assert_equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert type(left) is type(right)
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_a_tensor_dataset_is_fetched_whole(tensors: TensorDataset) -> None:
    fetch = choose(tensors, None, seed=0)
    assert isinstance(fetch, FetchTensors)
    assert_equal(fetch(request(3, 0, 3)), default_collate([tensors[i] for i in (3, 0, 3)]))


@pytest.mark.parametrize("indices", [[8, 1, 4, 4], range(2, 7), np.array([5, 0, 7])])
def test_subsets_of_a_tensor_dataset_too(tensors: TensorDataset, indices) -> None:
    outer = Subset(Subset(tensors, indices), [2, 0])
    fetch = choose(outer, default_collate, seed=0)
    assert isinstance(fetch, FetchTensors)
    assert_equal(fetch(request(1, 0)), default_collate([outer[1], outer[0]]))


def test_subsets_may_count_from_the_end(tensors: TensorDataset) -> None:
    subset = Subset(tensors, [-1, 2])
    assert_equal(choose(subset, None, 0)(request(0, 1)), default_collate([subset[0], subset[1]]))


def test_a_collate_function_of_the_users_sees_samples(tensors: TensorDataset) -> None:
    fetch = choose(tensors, len, seed=0)
    assert isinstance(fetch, FetchSamples)
    assert fetch(request(1, 2, 3)) == 3


def test_a_subclass_of_tensor_dataset_may_do_anything(tensors: TensorDataset) -> None:
    class Negated(TensorDataset):
        def __getitem__(self, index):
            return tuple(-tensor for tensor in super().__getitem__(index))

    dataset = Negated(*tensors.tensors)
    assert_equal(choose(dataset, None, 0)(request(4)), default_collate([dataset[4]]))


class Batched(Dataset):
    """Fetches whole batches; counts how."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> float:
        raise AssertionError("one by one")

    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        self.calls.append(indices)
        return [(index, torch.rand(()).item()) for index in indices]


def test_getitems_is_called_once_per_microbatch_under_a_key() -> None:
    dataset = Batched()
    fetch = choose(dataset, list, seed=1)
    assert isinstance(fetch, FetchBatch)
    first = fetch(request(5, 2))
    torch.rand(3)
    assert fetch(request(5, 2)) == first
    assert dataset.calls == [[5, 2], [5, 2]]
    assert isinstance(choose(Subset(dataset, [3, 4]), list, 1), FetchBatch)


def test_a_subset_of_plain_samples_is_fetched_one_by_one() -> None:
    assert isinstance(choose(Subset([1.0, 2.0], [1]), None, 0), FetchSamples)


class Drawing(Dataset):
    """Samples that hold what the generators gave them."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: int) -> tuple[int, tuple[float, float, float]]:
        for _ in range(index % 3):  # samples draw different amounts
            torch.rand(2), np.random.rand(), random.random()
        return index, (torch.rand(()).item(), float(np.random.rand()), random.random())


def draws(
    ranks: int = 1,
    workers: int = 0,
    *,
    epoch: int = 0,
    round_: int = 0,
    loader: int = 0,
    seed: int = 3,
):
    """Return what each sample of one loop over four replicas has drawn."""
    found = {}
    for rank in range(ranks):
        settings = LoaderSettings(
            batch_size=4, shuffle=True, collate=list, workers=Workers(count=workers)
        )
        source = build(Drawing(), settings, 4, block(4, ranks, rank), seed)
        for batch in source.batches(LoopKey(loader, epoch, round_)):
            for microbatch, samples in batch:
                torch.rand(rank + 1)  # what the loop's body draws must not matter
                random.random()
                found.update(samples[: microbatch.size])
    return found


def test_a_sample_draws_the_same_on_every_layout() -> None:
    one = draws(1)
    assert set(one) == set(range(11))
    assert one == draws(2) == draws(3) == draws(4)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_sample_draws_the_same_in_workers(workers: int) -> None:
    assert draws(1, workers) == draws(1, 0)


def test_all_three_generators_differ_between_samples_epochs_rounds_loaders_and_seeds() -> None:
    loops = [draws(), draws(epoch=1), draws(round_=1), draws(loader=1), draws(seed=4)]
    values = [drawn for loop in loops for drawn in loop.values()]
    for column in zip(*values, strict=True):
        assert len(set(column)) == len(values)


def test_a_random_collate_function_draws_the_same_on_every_layout() -> None:
    def collate(samples: list[int]) -> tuple[float, float, float]:
        return torch.rand(()).item(), float(np.random.rand()), random.random()

    def drawn(ranks: int) -> dict[tuple[int, int], tuple[float, float, float]]:
        found = {}
        for rank in range(ranks):
            source = build(
                list(range(10)),
                LoaderSettings(batch_size=4, collate=collate),
                4,
                block(4, ranks, rank),
                0,
            )
            for batch in source.batches(LoopKey(0, 0, 0)):
                for microbatch, data in batch:
                    torch.rand(rank + 1)
                    found[microbatch.step, microbatch.replica] = data
        return found

    one = drawn(1)
    assert len(set(one.values())) == 12
    assert one == drawn(2) == drawn(4)


class Damaged(Dataset[int]):
    """One sample cannot be read."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise OSError("x.jpg: image file is truncated")
        return index


def test_an_error_of_a_sample_names_its_index() -> None:
    with pytest.raises(OSError, match=r"x\.jpg: image file is truncated") as caught:
        choose(Damaged(), None, seed=0)(request(2, 5))
    assert caught.value.__notes__ == ["sample 5 of Damaged"]
