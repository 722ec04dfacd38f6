"""What ranks of one model send each other arrives as it was."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from typing import NamedTuple

import numpy as np
import pytest
import torch

from lockstep.engine.data.randomness import Generators
from lockstep.engine.strategies.pipeline import p2p
from lockstep.engine.strategies.pipeline.p2p import Message, assemble, dismantle
from lockstep.errors import ModelError

CPU = torch.device("cpu")


def sent(value: object) -> Message:
    """Send a value to a message's other end, block by block."""
    blocks = deque(p2p._outgoing(value, CPU)[1])
    received = p2p._incoming(lambda block: block.copy_(blocks.popleft()), CPU)
    assert not blocks
    return received


def same(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        pairs = zip(one.items(), other.items(), strict=True)
        return type(one) is type(other) and all(same(a, b) for a, b in pairs)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        pairs = zip(one, other, strict=True)
        return type(one) is type(other) and all(same(a, b) for a, b in pairs)
    return type(one) is type(other) and one == other


@pytest.mark.parametrize(
    "value",
    [
        torch.randn(3, 4),
        torch.tensor(True),
        [torch.randn(5000), torch.ones(3), torch.randn(70, 100), torch.zeros(0), torch.arange(9)],
        torch.empty(0, 5),
        torch.arange(6, dtype=torch.bfloat16),
        (1, 2.5, None, "x", True, float("inf")),
        {"out": torch.ones(2), 3: [torch.zeros(1, dtype=torch.int64), ()]},
        OrderedDict(b=torch.ones(1), a=torch.float16),
        [torch.full((1,), number) for number in range(100)],  # a header of several blocks
    ],
)
def test_values_arrive_as_they_were(value):
    assert same(sent(value).value, value)


def test_where_generators_stand_goes_over_no_device():
    before = Generators.now()
    torch.rand(1), np.random.rand(), random.random()
    states = Generators.now().since(before)
    assert states is not None
    _, blocks = p2p._outgoing([torch.ones(3), states, None, True], torch.device("meta"))
    assert [len(block) for block in blocks if block.is_meta] == [12], "the output alone"
    assert sum(len(block) for block in blocks if not block.is_meta) > 10_000
    assert sent([torch.ones(3), states]).value[1] == states


def test_a_size_arrives_as_a_tuple():
    assert sent(torch.Size([2, 3])).value == (2, 3)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4).transpose(0, 2),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 6)[2:],
    ],
)
def test_memory_is_laid_out_as_it_was(tensor):
    """Kernels choose by it, and round as they choose."""
    arrived = sent(tensor).value
    assert torch.equal(arrived, tensor)
    assert arrived.stride() == tensor.stride()


@pytest.mark.parametrize("tensor", [torch.randn(6, 4)[::2], torch.randn(3, 1).expand(3, 5)])
def test_what_has_gaps_arrives_without(tensor):
    arrived = sent(tensor).value
    assert torch.equal(arrived, tensor)
    assert arrived.is_contiguous()


def test_who_needs_gradients_is_told():
    value = [
        torch.ones(2, requires_grad=True),
        torch.ones(2),
        torch.ones(1, requires_grad=True) * 2,
    ]
    received = sent(value)
    assert received.needy == [True, False, True]
    assert not any(tensor.requires_grad for tensor in received.tensors)


def test_parts_and_tensors_make_the_value_again():
    tensors: list[torch.Tensor] = []
    parts = dismantle({"a": (torch.ones(1), 2)}, tensors)
    assert len(tensors) == 1
    assert assemble(parts, [torch.zeros(1)]) == {"a": (torch.zeros(1), 2)}


class Pair(NamedTuple):
    first: int
    second: int


@pytest.mark.parametrize("value", [Pair(1, 2), {1, 2}, [object()]])
def test_what_another_process_cannot_make_is_refused(value):
    with pytest.raises(ModelError, match="expected tensors and numbers in tuples"):
        dismantle(value, [])
