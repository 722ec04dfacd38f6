"""Iterable datasets: each item on exactly one replica, undisturbed by what the script draws."""

from __future__ import annotations

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from lockstep.engine.data.build import LoaderSettings, adopt, build
from lockstep.engine.data.microbatch import LoopKey
from lockstep.engine.data.sources import Workers
from lockstep.engine.layout.replicas import block


class Drawing(IterableDataset):
    """A stream that draws at every item, from all generators."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[tuple[int, tuple[float, float, float]]]:
        for number in range(self.length):
            yield number, (torch.rand(()).item(), float(np.random.rand()), random.random())


Read = dict[tuple[int, int], list]


def read(length: int, ranks: int, *, replicas=3, batch_size=5, epoch=0, disturb=0, **more) -> Read:
    found: Read = {}
    for rank in range(ranks):
        settings = LoaderSettings(batch_size=batch_size, collate=list, **more)
        source = build(Drawing(length), settings, replicas, block(replicas, ranks, rank), 11)
        for batch in source.batches(LoopKey(0, epoch, 0)):
            for m, items in batch:
                assert len(items) == max(1, m.size)
                found[m.step, m.replica] = items[: m.size]
                for _ in range(disturb):
                    torch.rand(rank + 1), np.random.rand(), random.random()
    return found


def items(found: Read) -> list[int]:
    return [number for key in sorted(found) for number, _ in found[key]]


@given(st.integers(0, 25), st.integers(1, 5), st.data())
@settings(max_examples=40, deadline=None)
def test_every_item_is_on_exactly_one_replica(length: int, replicas: int, data) -> None:
    ranks = data.draw(st.integers(1, replicas))
    found = read(length, ranks, replicas=replicas)
    assert items(found) == list(range(length))
    assert found == read(length, 1, replicas=replicas)


def test_draws_of_the_script_do_not_disturb_the_stream() -> None:
    assert read(17, 1) == read(17, 1, disturb=2) == read(17, 3, disturb=3)


def test_reading_the_stream_does_not_disturb_the_script() -> None:
    def drawn(length: int) -> list[tuple[float, float, float]]:
        torch.manual_seed(0), np.random.seed(0), random.seed(0)
        settings = LoaderSettings(batch_size=5, collate=list)
        source = build(Drawing(length), settings, 1, range(1), 0)
        return [
            (torch.rand(()).item(), np.random.rand(), random.random())
            for _ in source.batches(LoopKey(0, 0, 0))
        ]

    generator = torch.Generator().manual_seed(0)
    expected = [torch.rand((), generator=generator).item() for _ in range(3)]
    assert [values[0] for values in drawn(15)] == expected
    assert drawn(15)[:2] == drawn(10)


def test_epochs_draw_other_values() -> None:
    first, second = read(6, 1), read(6, 1, epoch=1)
    assert items(first) == items(second)
    assert not {d for v in first.values() for _, d in v} & {
        d for v in second.values() for _, d in v
    }


def test_drop_last_leaves_out_a_short_batch() -> None:
    assert items(read(17, 2, drop_last=True)) == list(range(15))


def test_a_short_last_batch_has_stand_ins() -> None:
    settings = LoaderSettings(batch_size=5, collate=list)
    source = build(Drawing(6), settings, 3, range(3), 0)
    *_, last = [list(batch) for batch in source.batches(LoopKey(0, 0, 0))]
    assert [(m.size, m.total, m.weight) for m, _ in last] == [(1, 1, 1.0), (0, 1, 0.0), (0, 1, 0.0)]
    assert [[number for number, _ in data] for _, data in last] == [[5], [5], [5]]


def test_one_worker_may_read_the_stream() -> None:
    found = read(12, 1, workers=Workers(1))
    assert items(found) == list(range(12))
    assert found == read(12, 1, workers=Workers(1), disturb=1)


def test_a_dataloader_over_a_stream_is_adopted() -> None:
    dataset = Drawing(7)
    data, adopted = adopt(DataLoader(dataset, batch_size=4, drop_last=True))
    assert data is dataset
    assert (adopted.batch_size, adopted.drop_last, adopted.shuffle) == (4, True, False)


def test_a_random_collate_function_draws_the_same_on_every_layout() -> None:
    def drawn(ranks: int) -> dict[tuple[int, int], float]:
        found = {}
        for rank in range(ranks):
            settings = LoaderSettings(batch_size=6, collate=lambda _: torch.rand(()).item())
            source = build(Drawing(12), settings, 3, block(3, ranks, rank), 0)
            torch.manual_seed(0)  # where the run's own keys would start
            for batch in source.batches(LoopKey(0, 0, 0)):
                for m, value in batch:
                    found[m.step, m.replica] = value
                    torch.rand(5)
        return found

    one = drawn(1)
    assert one == drawn(3)
    assert len(set(one.values())) == 6


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_empty_stream_has_no_batch(ranks: int) -> None:
    assert read(0, ranks) == {}


def test_a_stream_has_no_number_of_samples() -> None:
    made = build(Drawing(6), LoaderSettings(batch_size=3), 1, range(1), 0).batching()
    assert (made.batch_size, made.samples, made.order) == (3, None, "stream")
