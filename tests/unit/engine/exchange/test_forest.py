"""The forest of nodes that ranks hold, and which exchange a run uses."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.engine.exchange.base import Forest
from lockstep.engine.exchange.choose import choose_exchange
from lockstep.engine.exchange.native import NativeExchange
from lockstep.engine.layout.replicas import block
from lockstep.engine.layout.tree import fold, leaves, merges, total
from lockstep.errors import ExactnessError, UsageError, WorldError
from lockstep.registry import STRATEGIES
from lockstep.world import mpi

DDP = STRATEGIES.find("ddp")


def contributions(replicas: int, size: int = 7) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(replicas)
    scales = 10.0 ** torch.randint(-4, 5, (replicas, 1), generator=generator)
    return list(torch.randn(replicas, size, generator=generator) * scales)


def rank_nodes(values: list[torch.Tensor], ranks: int, rank: int) -> list[torch.Tensor]:
    own = block(len(values), ranks, rank)
    counts, _ = merges(leaves(own), len(values))
    return fold([values[replica].clone() for replica in own], counts, torch.add)


@given(st.integers(1, 24), st.data())
@settings(max_examples=60, deadline=None)
def test_both_sums_are_the_trees(replicas: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, replicas))
    values = contributions(replicas)
    expected = total(values, torch.add)
    forests = [Forest.of(replicas, ranks, rank) for rank in range(ranks)]
    nodes = [rank_nodes(values, ranks, rank) for rank in range(ranks)]
    assert [forest.own for forest in forests] == [len(own) for own in nodes]
    parts = [node for own in nodes for node in own]
    kept = [part.clone() for part in parts]
    for forest in forests:
        assert (forest.size, forest.counts) == (ranks, forests[0].counts)
        assert torch.equal(forest.sum(parts), expected)
        assert all(map(torch.equal, parts, kept)), "sum() changed a part"
    assert forests[0].sum_in_place(parts) is parts[0]
    assert torch.equal(parts[0], expected)


@pytest.mark.parametrize(
    ("replicas", "ranks", "counts"),
    [(1, 1, (1,)), (4, 1, (1,)), (4, 2, (1, 1)), (6, 2, (2, 2)), (4, 3, (1, 1, 1)), (5, 2, (2, 2))],
)
def test_counts(replicas: int, ranks: int, counts: tuple[int, ...]) -> None:
    assert Forest.of(replicas, ranks, 0).counts == counts


@pytest.mark.parametrize(
    ("replicas", "ranks", "exact"),
    [(1, 1, True), (2, 2, True), (4, 2, True), (6, 2, False), (3, 3, False), (4, 4, False)],
)
def test_native_is_exact_for_two_nodes_at_most(replicas: int, ranks: int, exact: bool) -> None:
    assert NativeExchange.is_exact(Forest.of(replicas, ranks, 0)) is exact


TWO, FOUR = Forest.of(2, 2, 0), Forest.of(4, 4, 0)


@pytest.mark.parametrize(
    ("wanted", "forest", "one_host", "device", "exact", "expected"),
    [
        ("auto", FOUR, True, "cpu", True, "shared-memory"),
        ("auto", TWO, True, "cpu", True, "shared-memory"),
        ("auto", TWO, False, "cpu", True, "native"),
        ("auto", FOUR, False, "cpu", True, "tree"),
        ("auto", TWO, True, "cuda", True, "native"),
        ("auto", FOUR, True, "cuda", True, "tree"),
        ("tree", TWO, True, "cpu", True, "tree"),
        ("native", TWO, True, "cpu", True, "native"),
        ("native", FOUR, True, "cpu", False, "native"),
        ("shared-memory", FOUR, True, "cpu", True, "shared-memory"),
    ],
)
def test_the_exchange_that_is_chosen(wanted, forest, one_host, device, exact, expected) -> None:
    assert (
        choose_exchange(DDP, wanted, forest, one_host=one_host, device=device, exact=exact)
        == expected
    )


@pytest.mark.parametrize(
    ("wanted", "one_host", "device", "error", "message"),
    [
        ("shared-memory", False, "cpu", UsageError, "ranks on several hosts"),
        ("shared-memory", True, "cuda", UsageError, "cuda"),
        ("mpi", True, "cuda", UsageError, "gradients on cuda; expected ranks on CPUs"),
        ("native", True, "cpu", ExactnessError, "4 ranks sums in an order of its own"),
    ],
)
def test_the_exchange_that_is_refused(wanted, one_host, device, error, message) -> None:
    with pytest.raises(error, match=message):
        choose_exchange(DDP, wanted, FOUR, one_host=one_host, device=device, exact=True)


def test_mpi_is_refused_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    mpi.library.cache_clear()
    mpi.communicator.cache_clear()
    with pytest.raises(WorldError, match="mpi4py cannot be imported"):
        choose_exchange(DDP, "mpi", FOUR, one_host=True, device="cpu", exact=True)
