"""State as a tree: everything that state_dict() may hold comes back as it was."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.checkpoint import state_codec
from lockstep.errors import CheckpointError


def again(state: dict[str, object]) -> dict[str, object]:
    text, tensors = state_codec.flatten(state)
    json.loads(text)
    return state_codec.rebuild(text, lambda name: tensors[name].clone())


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -3,
        1 << 80,
        0.1,
        math.inf,
        "a.b",
        b"\0\xff",
        1 - 2j,
        (1, (2.5, None)),
        [1, [], ()],
        {"a": {1: 2, (3, 4): "x", None: 0}},
        OrderedDict([("z", 1), ("a", 2)]),
        Counter({30: 1, 60: 2}),
        deque([1, 2]),
        {3, 1, 2},
        frozenset({"a"}),
        torch.Size([2, 3]),
        torch.float16,
        torch.device("cuda", 1),
    ],
    ids=repr,
)
def test_values_come_back_as_they_were(value):
    (found,) = again({"state": value}).values()
    assert found == value
    assert type(found) is type(value)


def test_a_float_keeps_its_bits():
    values = [math.pi * 10**power for power in range(-300, 300, 7)] + [-0.0, 5e-324]
    found = again({"x": values})["x"]
    assert [value.hex() for value in found] == [value.hex() for value in values]
    assert math.isnan(again({"x": math.nan})["x"])


def test_a_defaultdict_comes_back_without_its_factory():
    found = again({"state": defaultdict(list, a=[1])})["state"]
    assert type(found) is dict
    assert found == {"a": [1]}


def test_tensors_and_arrays_keep_type_shape_and_bits():
    state = {
        "t": torch.arange(6, dtype=torch.int16).view(2, 3).t(),
        "b": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "array": np.arange(4, dtype=np.uint16)[::2],
        "number": np.float32(0.1),
        "flag": np.bool_(True),
    }
    found = again({"deep": [state]})["deep"][0]
    for name in ("t", "b", "scalar", "empty"):
        assert found[name].dtype == state[name].dtype
        assert torch.equal(found[name], state[name])
    assert np.array_equal(found["array"], state["array"])
    assert found["array"].dtype == np.uint16
    assert (found["number"], type(found["number"])) == (np.float32(0.1), np.float32)
    assert type(found["flag"]) is np.bool_


@pytest.mark.parametrize("array", [np.array(3.5), np.array([1 + 2j]), np.eye(2)[::-1].T])
def test_arrays_of_any_shape_come_back(array):
    found = again({"array": array})["array"]
    assert (found.shape, found.dtype, found.tobytes()) == (
        array.shape,
        array.dtype,
        array.tobytes(),
    )


def test_names_of_tensors_are_paths_and_never_meet():
    one, two = torch.zeros(1), torch.ones(1)
    _, tensors = state_codec.flatten({"models": {"0": {"a.b": one, "a": {"b": two}}}})
    assert list(tensors) == ["models.0.a.b", "models.0.a.b#2"]
    assert again({"m": {"a.b": one, "a": {"b": two}}})["m"]["a"]["b"].item() == 1


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.AdamW(p, lr=0.1, amsgrad=True),
        lambda p: torch.optim.Adagrad(p, lr=0.1),
        lambda p: torch.optim.RMSprop([{"params": p, "lr": 0.3}], centered=True),
    ],
)
def test_optimizers_take_their_state_back(make):
    torch.manual_seed(0)
    one, other = nn.Linear(3, 2), nn.Linear(3, 2)
    first, second = make(list(one.parameters())), make(list(other.parameters()))
    one(torch.ones(1, 3)).sum().backward()
    first.step()
    second.load_state_dict(again({"o": first.state_dict()})["o"])
    assert str(second.state_dict()) == str(first.state_dict())


def test_sparse_tensors_are_named():
    sparse = torch.ones(2, 2).to_sparse()
    with pytest.raises(CheckpointError, match=r"registered\.x is a sparse or quantized tensor"):
        state_codec.flatten({"registered": {"x": sparse}})


class Odd:
    """Something that is no container, number, text or tensor."""


@pytest.mark.parametrize(
    "value", [Odd(), len, np.array(["a"]), object, np.ones(1, np.longdouble), np.ones(1, ">f8")]
)
def test_what_cannot_be_saved_is_named(value):
    with pytest.raises(CheckpointError, match=r"registered\.ema\.1") as caught:
        state_codec.flatten({"registered": {"ema": [0, value]}})
    assert "state_dict()" in caught.value.hint
