"""What is compared of data: equal for equal data, and another for any other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lockstep.engine.data.description import Description, checksum
from lockstep.engine.data.microbatch import Batching

VALUES: list[Any] = [
    None,
    1,
    1.0,
    True,
    "1",
    b"1",
    [1, 2],
    (1, 2),
    [[1], 2],
    {"a": 1},
    {"a": 2},
    {1, 2},
    range(3),
    torch.arange(3),
    torch.arange(3).float(),
    torch.arange(3)[None],
    torch.zeros(()),
    torch.ones((), dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.arange(6).reshape(2, 3).T,
    torch.view_as_complex(torch.ones(2, 2)),
    np.arange(3),
    np.arange(3.0),
    np.float32(1),
    np.array(["a", None], dtype=object),
    object(),
]


def test_values_of_all_kinds() -> None:
    sums = [checksum(value) for value in VALUES]
    assert len(set(sums)) == len(VALUES)
    again = [torch.clone(v) if isinstance(v, torch.Tensor) else v for v in VALUES]
    assert [checksum(value) for value in again] == sums
    assert checksum(object()) == checksum(VALUES[-1]), "its address does not count"
    assert checksum({"b", "a"}) == checksum({"a", "b"})


class Counting(Dataset[int]):
    """Tells whether a sample was fetched."""

    fetched = 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        self.fetched += 1
        return index


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        (Subset(Counting(), [0, 1]), Subset(Counting(), [0, 2]), {"indices"}),
        (Subset(Counting(), np.arange(2)), Subset(Counting(), np.arange(3)), {"indices", "length"}),
        (TensorDataset(torch.zeros(3)), TensorDataset(torch.ones(3)), {"values"}),
        (ConcatDataset([[1], [2]]), ConcatDataset([[1], [3]]), {"values"}),
        ([1, 2], (1, 2), {"kind", "values"}),
    ],
)
def test_what_is_named(one: Any, other: Any, names: set[str]) -> None:
    first, second = Description(one).parts(), Description(other).parts()
    assert {n for n in {*first, *second} if first.get(n) != second.get(n)} == names


def test_no_sample_is_fetched_for_it() -> None:
    dataset = Counting()
    Description(Subset(dataset, [1, 2]), SubsetRandomSampler([0, 1])).parts()
    assert dataset.fetched == 0


def test_indices_are_part_of_how_batches_are_made() -> None:
    def batching(indices: list[int] | None) -> Batching:
        data = Counting() if indices is None else Subset(Counting(), indices)
        found = Description(data).indices()
        return Batching(batch_size=2, samples=2, order="x", drop_last=False, indices=found)

    assert batching([0, 1]).differences(batching([0, 1])) == []
    assert "indices" in batching([0, 1]).differences(batching([1, 0]))[0]
    assert batching(None).differences(batching([0, 1])) == [], "an older state does not say"


def test_weights_of_torchs_sampler_are_too() -> None:
    weights = [Description([1, 2], WeightedRandomSampler([1.0, w], 2)).indices() for w in (1, 1, 2)]
    assert weights[0] == weights[1] != weights[2]
