"""What users pass to `run.loader`: adopted, or refused with a reason."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from lockstep.engine.data.build import LoaderSettings, adopt, build
from lockstep.engine.data.microbatch import LoopKey
from lockstep.engine.data.orders import SamplerOrder
from lockstep.engine.data.sources import Workers
from lockstep.engine.layout.replicas import block
from lockstep.errors import LoaderError


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.fixture
def dataset() -> TensorDataset:
    return TensorDataset(torch.arange(24))


def order(
    data: Any,
    settings: LoaderSettings,
    *,
    replicas: int = 2,
    ranks: int = 1,
    epoch: int = 0,
    seed: int = 0,
) -> list[int]:
    """Return the indices of one loop in order, put together from all ranks."""
    parts: dict[tuple[int, int], list[int]] = {}
    for rank in range(ranks):
        source = build(data, settings, replicas, block(replicas, ranks, rank), seed)
        for batch in source.batches(LoopKey(0, epoch, 0)):
            for m, _ in batch:
                parts[m.step, m.replica] = m.indices[: m.size].tolist()
    return [index for key in sorted(parts) for index in parts[key]]


def adopted(loader: DataLoader, **more: Any) -> list[int]:
    return order(*adopt(loader), **more)


def test_settings_are_adopted(dataset: TensorDataset) -> None:
    def collate(samples: list[Any]) -> int:
        return len(samples)

    loader = DataLoader(
        dataset,
        batch_size=7,
        drop_last=True,
        collate_fn=collate,
        num_workers=2,
        prefetch_factor=3,
        persistent_workers=True,
        timeout=9,
    )
    data, settings = adopt(loader)
    assert data is dataset
    assert (settings.batch_size, settings.drop_last, settings.collate) == (7, True, collate)
    assert settings.workers.count == 2
    assert settings.workers.settings["prefetch_factor"] == 3
    assert settings.workers.settings["persistent_workers"] is True
    assert settings.workers.settings["timeout"] == 9


def test_without_workers_no_setting_of_workers_is_adopted(dataset: TensorDataset) -> None:
    assert adopt(DataLoader(dataset, batch_size=4))[1].workers == Workers()


def test_a_default_collate_function_keeps_tensor_datasets_whole(dataset: TensorDataset) -> None:
    data, settings = adopt(DataLoader(dataset, batch_size=4))
    source = build(data, settings, 1, range(1), 0)
    (_, batch) = next(next(source.batches(LoopKey(0, 0, 0))))
    assert [tensor.tolist() for tensor in batch] == [[0, 1, 2, 3]]


@pytest.mark.parametrize("generator", [None, torch.Generator().manual_seed(5)])
def test_shuffle_becomes_a_keyed_shuffle(dataset: TensorDataset, generator: Any) -> None:
    loader = DataLoader(dataset, batch_size=8, shuffle=True, generator=generator)
    plain = LoaderSettings(batch_size=8, shuffle=True)
    assert adopted(loader) == order(dataset, plain)
    assert adopted(loader) != list(range(24))
    assert adopted(loader, epoch=1) == order(dataset, plain, epoch=1)


def test_no_shuffle_stays_the_datasets_order(dataset: TensorDataset) -> None:
    assert adopted(DataLoader(dataset, batch_size=8)) == list(range(24))


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_distributed_sampler_says_whether_to_shuffle(dataset: TensorDataset, shuffle) -> None:
    sampler = DistributedSampler(dataset, num_replicas=3, rank=1, shuffle=shuffle)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    expected = order(dataset, LoaderSettings(batch_size=8, shuffle=shuffle))
    assert adopted(loader) == expected
    assert sorted(expected) == list(range(24))


def test_a_distributed_sampler_with_an_order_of_its_own_is_not_passed_over(dataset) -> None:
    class Backwards(DistributedSampler):
        def __iter__(self) -> Iterator[int]:
            return iter(range(23, -1, -1))

    sampler = Backwards(dataset, num_replicas=1, rank=0)
    loader = DataLoader(dataset, batch_size=8, sampler=sampler)
    try:
        got = adopted(loader)
    except LoaderError:
        return  # refused with a reason: fine as well
    assert got == list(range(23, -1, -1))


@pytest.mark.parametrize("kind", [SequentialSampler, RandomSampler])
def test_a_sampler_over_a_part_of_the_data_is_honoured(dataset: TensorDataset, kind) -> None:
    loader = DataLoader(dataset, batch_size=4, sampler=kind(range(10)))
    assert sorted(adopted(loader)) == list(range(10))


SAMPLERS = {
    "weighted": lambda g: WeightedRandomSampler(
        [float(i) for i in range(24)], 20, replacement=True, generator=g
    ),
    "random with replacement": lambda g: RandomSampler(range(24), replacement=True, generator=g),
    "random, fewer": lambda g: RandomSampler(range(24), num_samples=20, generator=g),
    "subset": lambda g: SubsetRandomSampler(list(range(3, 23)), generator=g),
}


@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("own", [False, True], ids=["global generator", "own generator"])
def test_a_sampler_is_honoured_and_repeats_exactly(dataset: TensorDataset, name, own) -> None:
    def loader() -> DataLoader:
        generator = torch.Generator().manual_seed(torch.seed()) if own else None
        return DataLoader(dataset, batch_size=8, sampler=SAMPLERS[name](generator))

    one = loader()
    first, second = adopted(one), adopted(one, epoch=1)
    assert first != second
    assert len(first) == len(one.sampler)
    assert adopted(loader()) == first == adopted(one)
    assert adopted(loader(), ranks=2) == first
    assert adopted(loader(), epoch=1, ranks=2) == second
    assert adopted(loader(), seed=1) != first


def test_weights_are_honoured(dataset: TensorDataset) -> None:
    weights = [0.0] * 20 + [1.0] * 4
    loader = DataLoader(dataset, batch_size=8, sampler=WeightedRandomSampler(weights, 24))
    assert set(adopted(loader)) <= {20, 21, 22, 23}


def test_a_sampler_may_be_any_sized_iterable(dataset: TensorDataset) -> None:
    assert order(dataset, LoaderSettings(batch_size=2, sampler=[5, 3, 1])) == [5, 3, 1]


def test_a_sampler_whose_length_lies(dataset: TensorDataset) -> None:
    class Short(Sampler):
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Iterator[int]:
            return iter([1, 2])

    with pytest.raises(LoaderError, match="Short yielded 2 indices; expected 5"):
        SamplerOrder(Short(), 0).order(LoopKey(0, 0, 0))


@pytest.mark.parametrize("sampler", [iter([1]), 5])
def test_a_sampler_without_a_length(dataset: TensorDataset, sampler: Any) -> None:
    with pytest.raises(LoaderError, match="no length or cannot be iterated") as caught:
        build(dataset, LoaderSettings(batch_size=2, sampler=sampler), 1, range(1), 0)
    assert caught.value.hint


def test_a_sampler_of_batches_is_refused(dataset: TensorDataset) -> None:
    batches = BatchSampler(SequentialSampler(dataset), 4, drop_last=False)
    settings = LoaderSettings(batch_size=4, sampler=batches)
    with pytest.raises(LoaderError):
        order(dataset, settings)


class OtherBatches(BatchSampler):
    pass


class Buckets:
    """Batches of several sizes, in a different order each time."""

    def __iter__(self) -> Iterator[Any]:
        batches = [[0, 1, 2, 3, 4], [7], torch.tensor([9, 8]), (5, 6, 23, 22)]
        return (batches[place] for place in torch.randperm(4).tolist())

    def __len__(self) -> int:
        return 4


def batches_of(source: Any, epoch: int = 0, first: int = 0) -> list[list[int]]:
    """Return the samples of each batch of one loop on one rank."""
    found = source.batches(LoopKey(0, epoch, 0), first)
    return [[i for m, _ in batch for i in m.indices[: m.size].tolist()] for batch in found]


def test_batches_of_a_batch_sampler_are_the_global_ones(dataset: TensorDataset) -> None:
    settings = LoaderSettings(batch_sampler=Buckets())
    source = build(dataset, settings, 3, range(3), 0)
    assert len(source) == 4
    epochs = [batches_of(source, epoch) for epoch in range(3)]
    assert [sorted(map(len, batches)) for batches in epochs] == [[1, 2, 4, 5]] * 3
    assert len({str(batches) for batches in epochs}) > 1
    # Ranks of unequal load draw the same, also where they begin in the middle.
    for epoch, whole in enumerate(epochs):
        parts = [build(dataset, settings, 3, block(3, 2, rank), 0) for rank in range(2)]
        for first in (0, 2):
            both = zip(*(batches_of(part, epoch, first) for part in parts), strict=True)
            assert [a + b for a, b in both] == whole[first:]
    stand_ins = [
        m.size for batch in source.batches(LoopKey(0, 0, 0)) for m, _ in batch if m.total == 1
    ]
    assert stand_ins == [1, 0, 0]
    assert source.batching().batches == 4


@pytest.mark.parametrize(
    "make",
    [
        lambda data: BatchSampler(SequentialSampler(data), 5, drop_last=False),
        lambda data: OtherBatches(SequentialSampler(data), 5, drop_last=False),
        lambda _: [[0, 1, 2, 3, 4], *([i] for i in range(5, 24))],
    ],
)
def test_a_batch_sampler_is_adopted(dataset: TensorDataset, make) -> None:
    loader = DataLoader(dataset, batch_sampler=make(dataset))
    source = build(*adopt(loader), 2, range(2), 0)
    assert batches_of(source) == [list(batch) for batch in loader.batch_sampler]
    assert len(source) == len(loader)


def test_a_generator_inside_a_batch_sampler_is_set(dataset: TensorDataset) -> None:
    def draw(number: int) -> list[list[int]]:
        own = RandomSampler(dataset, generator=torch.Generator().manual_seed(number))
        settings = LoaderSettings(batch_sampler=BatchSampler(own, 5, drop_last=True))
        return batches_of(build(dataset, settings, 2, range(2), 0))

    assert draw(1) == draw(2)
    assert len(draw(1)) == 4


class Lying(Buckets):
    def __len__(self) -> int:
        return 5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch_size": 4}, "batch_sampler and batch_size; expected one of the two"),
        ({"sampler": [0], "drop_last": True}, "batch_sampler and sampler, drop_last"),
        ({"shuffle": True}, "batch_sampler and shuffle"),
        ({"batch_sampler": iter([[0]])}, "the batch sampler list_iterator has no length"),
        ({"batch_sampler": []}, "which makes no batch of list"),
        ({"batch_sampler": Lying()}, "Lying yielded 4 batches; expected 5, its length"),
        ({"batch_sampler": range(3)}, "range yielded a value of type int; expected the indices"),
        ({"batch_sampler": [[0], []]}, "list yielded a batch without samples"),
        (
            {"batch_sampler": BatchSampler(DistributedSampler([0] * 8, 2, 0), 2, False)},
            "one rank's",
        ),
    ],
)
def test_a_batch_sampler_that_is_refused(dataset: TensorDataset, settings, message) -> None:
    with pytest.raises(LoaderError, match=message) as caught:
        batches_of(
            build(
                dataset, LoaderSettings(**{"batch_sampler": Buckets(), **settings}), 2, range(2), 0
            )
        )
    assert caught.value.hint


def test_a_batch_sampler_over_a_stream() -> None:
    with pytest.raises(LoaderError, match="Stream is a stream"):
        build(Stream(), LoaderSettings(batch_sampler=Buckets()), 1, range(1), 0)


@pytest.mark.parametrize(
    "make",
    [
        lambda data: DataLoader(data, batch_size=None),
        lambda data: DataLoader(data, sampler=OtherBatches(range(4), 2, False), batch_size=None),
        lambda _: DataLoader(Stream(), batch_size=None),
    ],
    ids=["no batches", "batches as samples", "stream without batches"],
)
def test_batches_that_cannot_be_split_are_refused(dataset: TensorDataset, make) -> None:
    with pytest.raises(LoaderError, match="has batch_size=None") as caught:
        adopt(make(dataset))
    assert "batch_size" in caught.value.hint


@pytest.mark.parametrize(
    ("data", "settings", "message"),
    [
        ([], {"batch_size": 4}, "list has 0 samples, which makes no batch of 4"),
        ([1, 2], {"batch_size": 4, "drop_last": True}, "2 samples, .* with drop_last=True"),
        (range(9), {"batch_size": 2}, "a global batch of 2 for 3 replicas"),
        (iter([1]), {"batch_size": 4}, "list_iterator is no dataset"),
        (5, {"batch_size": 4}, "int is no dataset"),
        ({1, 2, 3, 4}, {"batch_size": 4}, "set is no dataset"),
        (Stream(), {"batch_size": 4, "shuffle": True}, "Stream is a stream, which has no order"),
        (Stream(), {"batch_size": 4, "sampler": [1]}, "Stream is a stream, which has no order"),
        (Stream(), {"batch_size": 4, "workers": Workers(2)}, "2 workers for the stream Stream"),
    ],
)
def test_what_cannot_be_split_is_refused_with_a_hint(data, settings, message) -> None:
    with pytest.raises(LoaderError, match=message) as caught:
        build(data, LoaderSettings(**settings), 3, range(3), 0)
    assert caught.value.hint
    assert caught.value.exit_code == 1


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, "8", None])
def test_a_batch_size_that_is_none(batch_size: Any) -> None:
    with pytest.raises(LoaderError, match="batch_size is"):
        LoaderSettings(batch_size=batch_size)


def test_shuffle_and_a_sampler() -> None:
    with pytest.raises(LoaderError, match="at most one of them"):
        LoaderSettings(batch_size=1, shuffle=True, sampler=[0])
