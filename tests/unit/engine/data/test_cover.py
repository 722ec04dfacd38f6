"""Which samples go where: each to exactly one replica, whatever the layout."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from lockstep.engine.data.build import LoaderSettings, build
from lockstep.engine.data.microbatch import LoopKey, Microbatch
from lockstep.engine.layout.replicas import block

Seen = dict[tuple[int, int], tuple[Microbatch, list[int]]]


def numbers(length: int) -> TensorDataset:
    return TensorDataset(torch.arange(length))


def see(length: int, batch_size: int, replicas: int, ranks: int, epoch: int = 0, **more) -> Seen:
    """Return what each replica of each step sees, as `ranks` ranks would read it."""
    seen: Seen = {}
    for rank in range(ranks):
        own = block(replicas, ranks, rank)
        source = build(
            numbers(length), LoaderSettings(batch_size=batch_size, **more), replicas, own, 7
        )
        steps = [list(batch) for batch in source.batches(LoopKey(0, epoch, 0))]
        assert len(steps) == len(source)
        for step, microbatches in enumerate(steps):
            assert [m.replica for m, _ in microbatches] == list(own)
            assert [m.first for m, _ in microbatches] == [r == own[0] for r in own]
            assert [m.last for m, _ in microbatches] == [r == own[-1] for r in own]
            for microbatch, (data,) in microbatches:
                assert microbatch.step == step
                seen[step, microbatch.replica] = (microbatch, data.tolist())
    return seen


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int, int]:
    replicas = draw(st.integers(1, 6))
    batch_size = draw(st.integers(replicas, replicas + 9))
    return draw(st.integers(1, 50)), batch_size, replicas, draw(st.integers(1, replicas))


@given(shapes(), st.booleans())
@settings(max_examples=60, deadline=None)
def test_every_sample_is_seen_by_exactly_one_replica(shape, shuffle) -> None:
    length, batch_size, replicas, ranks = shape
    seen = see(length, batch_size, replicas, ranks, shuffle=shuffle)
    counted = [index for m, _ in seen.values() for index in m.indices[: m.size].tolist()]
    assert sorted(counted) == list(range(length))
    for microbatch, data in seen.values():
        assert data == microbatch.indices.tolist()
        assert len(data) == max(microbatch.size, 1)


@given(shapes(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_shares_are_balanced_and_weigh_one_in_all(shape, shuffle) -> None:
    length, batch_size, replicas, ranks = shape
    seen = see(length, batch_size, replicas, ranks, shuffle=shuffle)
    for step in range(-(-length // batch_size)):
        shares = [seen[step, replica][0] for replica in range(replicas)]
        sizes = [m.size for m in shares]
        total = min(batch_size, length - step * batch_size)
        assert {m.total for m in shares} == {total}
        assert sum(sizes) == total
        assert max(sizes) - min(sizes) <= 1
        assert sum(Fraction(m.size, m.total) for m in shares) == 1
        assert [m.weight for m in shares] == [size / total for size in sizes]


@given(shapes(), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_replica_sees_the_same_on_every_layout(shape, shuffle) -> None:
    length, batch_size, replicas, ranks = shape
    one = see(length, batch_size, replicas, 1, shuffle=shuffle)
    several = see(length, batch_size, replicas, ranks, shuffle=shuffle)
    assert {key: data for key, (_, data) in one.items()} == {
        key: data for key, (_, data) in several.items()
    }


def order(length: int, **more) -> list[int]:
    return [i for _, data in see(length, 8, 1, 1, **more).values() for i in data]


def test_shuffled_orders_differ_between_epochs_and_repeat_exactly() -> None:
    epochs = [order(40, shuffle=True, epoch=epoch) for epoch in range(3)]
    assert order(40) == list(range(40))
    assert len({tuple(epoch) for epoch in [*epochs, order(40)]}) == 4
    assert epochs == [order(40, shuffle=True, epoch=epoch) for epoch in range(3)]


def test_the_order_is_the_same_for_any_number_of_replicas() -> None:
    def flat(replicas: int) -> list[int]:
        return [
            i
            for m, _ in see(37, 12, replicas, 1, shuffle=True).values()
            for i in m.indices[: m.size]
        ]

    assert flat(1) == flat(3) == flat(12)


def test_stand_ins_repeat_a_sample_at_weight_zero() -> None:
    seen = see(10, 8, 4, 2)
    assert [seen[1, replica][0].size for replica in range(4)] == [1, 1, 0, 0]
    assert [seen[1, replica][0].weight for replica in range(4)] == [0.5, 0.5, 0.0, 0.0]
    assert [seen[1, replica][1] for replica in range(4)] == [[8], [9], [8], [8]]


@pytest.mark.parametrize(("length", "expected"), [(16, 2), (17, 3), (23, 3), (24, 3)])
def test_the_length_is_the_number_of_global_batches(length: int, expected: int) -> None:
    source = build(numbers(length), LoaderSettings(batch_size=8), 2, range(2), 0)
    assert len(source) == expected == len(list(source.batches(LoopKey(0, 0, 0))))


def test_drop_last_leaves_out_the_short_batch_only() -> None:
    seen = see(23, 8, 2, 2, drop_last=True)
    assert {m.total for m, _ in seen.values()} == {8}
    assert sorted(i for _, data in seen.values() for i in data) == list(range(16))


def test_positions_beyond_one_chunk_of_indices() -> None:
    seen = see(9001, 1500, 2, 1, shuffle=True)
    counted = [i for m, data in seen.values() for i in data[: m.size]]
    assert sorted(counted) == list(range(9001))
