"""A rank's share of a gradient: the tree's sums over its block, whatever is missing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from lockstep.engine.exchange.flat import FlatLayout, form
from lockstep.engine.layout.replicas import block
from lockstep.engine.layout.tree import fold, merges, nodes, total
from lockstep.engine.strategies.gradient_accumulation import (
    NO_GRADIENT,
    GradientAccumulation,
    add,
    missing_like,
    take_gradients,
    write,
)


def bits(value: torch.Tensor | None) -> bytes | None:
    return None if value is None else value.contiguous().numpy().tobytes()


def copied(gradients: list) -> list:
    return [None if g is None else g.clone() for g in gradients]


def reference(left: list, right: list) -> list:
    """The sum where a missing gradient is the neutral element."""
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]


@st.composite
def replicas_gradients(draw: st.DrawFn) -> list[list[torch.Tensor | None]]:
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    count = draw(st.integers(1, 9))
    return [
        [
            None
            if draw(st.booleans())
            else torch.randn(3, generator=generator) * 10.0 ** draw(st.integers(-4, 4))
            for _ in range(3)
        ]
        for _ in range(count)
    ]


@given(replicas_gradients(), st.data())
@settings(max_examples=80, deadline=None)
def test_blocks_with_missing_gradients_sum_to_the_tree(gradients, data: st.DataObject) -> None:
    replicas = len(gradients)
    ranks = data.draw(st.integers(1, replicas))
    parts, intervals = [], []
    for rank in range(ranks):
        own = block(replicas, ranks, rank)
        accumulation = GradientAccumulation(own, replicas)
        for replica in own:
            accumulation.push(copied(gradients[replica]))
        taken = accumulation.take()
        assert len(taken) == len(nodes(own, replicas))
        assert accumulation.take() == []
        parts += taken
        intervals += nodes(own, replicas)
    counts, _ = merges(intervals, replicas)
    (root,) = fold(parts, counts, add)
    assert list(map(bits, root)) == list(map(bits, total(gradients, reference)))


@pytest.mark.parametrize("other", [None, NO_GRADIENT])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_missing_gradient_keeps_the_sign_of_a_zero(zero: float, other: float | None) -> None:
    there = torch.tensor([zero])
    missing = None if other is None else torch.full((1,), other)
    for left, right in ((there, missing), (missing, there)):
        (result,) = add([None if left is None else left.clone()], [right])
        assert bits(result) == bits(there)


def test_adding_changes_the_left_one_in_place() -> None:
    left, right = [torch.ones(2), None], [torch.ones(2), torch.ones(1)]
    first = left[0]
    assert add(left, right) is left
    assert left[0] is first
    assert first.tolist() == [2, 2]
    assert right[0].tolist() == [1, 1]


def test_conjugated_gradients_are_added_beside_real_ones() -> None:
    """A view that only says it is conjugated cannot be added to in place."""
    left = [torch.ones(2), torch.tensor([1 + 2j]).conj(), None]
    right = [torch.ones(2), torch.tensor([3 + 4j]).conj(), torch.tensor([5j])]
    real, conjugated, alone = add(left, right)
    assert (real.tolist(), conjugated.tolist(), alone.tolist()) == ([2, 2], [4 - 6j], [5j])


def test_pending_merges_follow_the_tree() -> None:
    accumulation = GradientAccumulation(range(4), 4)
    found = []
    for _ in range(4):
        found.append(accumulation.pending_merges)
        accumulation.push([torch.ones(1)])
    assert found == [0, 1, 0, 2]
    assert [[g.item() for g in node] for node in accumulation.nodes] == [[4.0]]


def test_taking_gradients_leaves_none() -> None:
    parameters = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    parameters[0].grad = torch.ones(1)
    taken = take_gradients(parameters)
    assert (taken[0].item(), taken[1]) == (1.0, None)
    assert [p.grad for p in parameters] == [None, None]


def test_what_stands_for_a_missing_gradient_changes_no_bit() -> None:
    for dtype in (torch.float32, torch.complex64):
        parameter = torch.zeros(2, dtype=dtype)
        zeros = torch.full_like(parameter, complex(-0.0, -0.0) if dtype.is_complex else -0.0)
        flat = torch.ones(4 if dtype.is_complex else 2)
        write(flat, [None], FlatLayout([form(parameter)]))
        assert torch.signbit(flat).all()
        (total,) = add([zeros.clone()], [missing_like(parameter)])
        assert bits(total) == bits(zeros)
