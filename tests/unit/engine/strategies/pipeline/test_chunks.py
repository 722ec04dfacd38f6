"""Chunks are cut from the tensors that are named, and from no other, however long it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lockstep.engine.strategies.pipeline.chunks import merge, split
from lockstep.errors import ModelError

X, MASK, SCALAR = torch.arange(12.0).view(4, 3), torch.ones(4, 4), torch.tensor(2.0)


@pytest.mark.parametrize(
    ("tensors", "arguments", "chunks", "named", "sizes", "cut"),
    [
        ([X], ["x"], 2, None, [2, 2], {0}),
        ([X], ["x"], 3, None, [2, 1, 1], {0}),
        ([X], ["x"], 64, None, [1, 1, 1, 1], {0}),
        ([SCALAR, X], ["scale", "x"], 2, None, [2, 2], {1}),
        ([X, MASK], ["x", "mask"], 2, ["x"], [2, 2], {0}),  # as long as the batch, and whole
        ([MASK, X], ["mask", "x"], 2, ["x"], [2, 2], {1}),
        ([X, X, MASK], ["pair", "pair", "mask"], 2, ["pair"], [2, 2], {0, 1}),
        ([X, MASK], ["x", "mask"], 2, ["x", "mask"], [2, 2], {0, 1}),
        ([X, MASK], ["x", "mask"], 2, [], [1], set()),
        ([X, MASK], ["x", "mask"], 1, None, [1], set()),
        ([X[:0]], ["x"], 2, None, [0], {0}),
    ],
)
def test_what_is_cut(
    tensors: Any, arguments: Any, chunks: int, named: Any, sizes: list[int], cut: set[int]
) -> None:
    found = split(tensors, arguments, chunks, named)
    assert (found.sizes, found.cut) == (sizes, cut)
    for place, tensor in enumerate(tensors):
        parts = [found.part(place, tensor, chunk) for chunk in range(len(sizes))]
        if place in cut:
            assert torch.equal(torch.cat(parts), tensor)
            assert torch.equal(found.gradient(place, parts, tensor), tensor)
            halves = found.gradient(place, [None, *parts[1:]], tensor)
            assert (halves is None) == (len(parts) == 1)
        else:
            assert all(part is tensor for part in parts)
            assert torch.equal(found.gradient(place, parts, tensor), tensor * len(parts))


def test_a_stage_may_change_its_input_in_place() -> None:
    position, x = torch.ones(3, requires_grad=True), X.clone()
    weight = torch.ones(2, 3, requires_grad=True)
    found = split([x], ["x"], 2, None)
    outputs = []
    for chunk in range(2):
        part = found.part(0, x, chunk)
        part += position
        outputs.append(torch.nn.functional.linear(part, weight))
    for output in outputs:
        output.sum().backward()
    assert position.grad is not None
    assert weight.grad is not None
    assert position.grad.tolist() == [8.0] * 3
    assert torch.equal(weight.grad, (X + 1).sum(0).expand(2, 3))


@pytest.mark.parametrize(
    ("tensors", "named", "match"),
    [
        ([X, MASK], None, r"called with 2 tensors \(x, mask\) and chunks=2; expected to be told"),
        ([X, MASK[:3]], ["x", "mask"], "different lengths: x has 4, mask has 3 rows"),
    ],
)
def test_what_is_not_guessed(tensors: Any, named: Any, match: str) -> None:
    with pytest.raises(ModelError, match=match) as caught:
        split(tensors, ["x", "mask"], 2, named)
    assert caught.value.hint


def test_outputs_are_put_together() -> None:
    parts = [{"y": X[:3].requires_grad_(), "n": 1}, {"y": X[3:], "n": 1}]
    whole = merge(parts, [3, 1])
    assert torch.equal(whole["y"], X)
    with pytest.raises(
        ModelError, match=r"shape \(4, 3\) for a chunk of 2 samples; expected one row"
    ):
        merge([X, X], [2, 2])
    with pytest.raises(ModelError, match="outputs of different forms"):
        merge([(X,), [X]], [4, 4])
