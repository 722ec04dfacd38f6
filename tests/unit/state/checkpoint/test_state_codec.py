"""State as a tree: everything that state_dict() may hold comes back as it was."""

from __future__ import annotations

import datetime as dt
import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.errors import CheckpointError
from lockstep.state.checkpoint import state_codec


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


def options(value: Any) -> Any:
    """Return what a type may say besides its elements, and equality leaves out."""
    if isinstance(value, deque):
        return value.maxlen
    if isinstance(value, defaultdict):
        return value.default_factory
    if isinstance(value, torch.Tensor):
        return type(value), value.dtype, value.requires_grad, value.stride(), value.tolist()
    if isinstance(value, np.ndarray | np.generic):
        kind = value.flags.fnc if isinstance(value, np.ndarray) else None
        return type(value), value.dtype.str, kind, value.tobytes()
    return getattr(value, "_metadata", None)


@pytest.mark.parametrize(
    "value",
    [
        *(deque([1, 2], maxlen=5), deque([(1, {})], maxlen=1), deque(maxlen=0)),
        defaultdict(list, a=[1]),
        defaultdict(None, {1: 2}),
        *(defaultdict(kind) for kind in (int, float, dict, set, deque, Counter, OrderedDict)),
        nn.Sequential(nn.BatchNorm1d(1)).state_dict(),
        *(kind(1.5) for kind in (np.float16, np.float32, np.float64, np.complex64, np.complex128)),
        *(np.complex64(complex(math.nan, -0.0)), np.uint64(2**64 - 1), np.int8(-128), np.bool_(0)),
        *(np.datetime64("2020-02-29T12"), np.datetime64("NaT", "ms"), np.timedelta64(3, "ms")),
        *(np.asfortranarray(np.eye(2, 3)), np.zeros((2, 0, 3), order="F"), np.float32([[1, 2]]).T),
        torch.ones(2, requires_grad=True),
        nn.Parameter(torch.ones(2)),
        nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False),
        torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        nn.Parameter(torch.rand(3, 4).t()),
        10**4000,
    ],
    ids=lambda value: f"{type(value).__name__}-{options(value)}"[:60],
)
def test_options_of_types_come_back(value):
    (found,) = again({"state": value}).values()
    assert type(found) is type(value)
    assert repr(options(found)) == repr(options(value))
    if not isinstance(value, np.ndarray | np.generic | torch.Tensor):
        assert repr(found) == repr(value)


def test_sums_have_the_bits_that_they_had():
    """They follow the order of elements in memory."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(8, 16, 5, 5, generator=generator).to(memory_format=torch.channels_last)
    matrix = torch.randn(64, 64, generator=generator).t()
    array = np.asfortranarray(image[:, :, 0, 0].numpy())
    found = again({"state": [image, matrix, array]})["state"]
    assert [x.sum().item() for x in found] == [x.sum().item() for x in (image, matrix, array)]
    assert image.sum() != image.contiguous().sum(), "this test could not fail"


def test_what_a_rank_reads_in_parts_is_left_to_the_model():
    text, _ = state_codec.flatten({"state": torch.ones(3, 4).t()})
    part = object()
    assert state_codec.rebuild(text, lambda _: part) == {"state": part}


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


def test_nested_tensors_are_named():
    nested = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
    with pytest.raises(CheckpointError, match=r"registered\.x is a nested tensor"):
        state_codec.flatten({"registered": {"x": nested}})


def test_sparse_tensors_are_named():
    sparse = torch.ones(2, 2).to_sparse()
    with pytest.raises(CheckpointError, match=r"registered\.x is a sparse or quantized tensor"):
        state_codec.flatten({"registered": {"x": sparse}})


class Odd:
    """Something that is no container, number, text or tensor."""


class Kind(enum.Enum):
    """Some kind."""

    ONE = 1


class Level(enum.IntEnum):
    """A number with a name."""

    ONE = 1


class Pair(NamedTuple):
    """A tuple with names."""

    a: int
    b: int


class Own(dict):
    """A mapping of the script's own."""


@pytest.mark.parametrize(
    "value",
    [
        *(Odd(), len, object, Kind.ONE, Level.ONE, Pair(1, 2), Own(a=1), 10**5000),
        *(dt.date(2020, 1, 1), Path("a"), bytearray(b"a"), range(3), torch.Generator()),
        *(defaultdict(lambda: 0), defaultdict(Own, a=1)),
        *(np.longdouble(1) / 3, np.clongdouble(1j), np.str_("a"), np.bytes_(b"a"), np.dtype("f4")),
        *(np.array(["a"]), np.ones(1, np.longdouble), np.ones(1, ">f8"), np.array([None])),
        *(np.zeros(1, "i4,f8"), np.zeros(1, "i4,f8")[0], np.array(["2020"], "M8[D]")),
        np.ma.masked_array([1, 2], [0, 1]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_saved_is_named(value):
    with pytest.raises(CheckpointError, match=r"registered\.ema\.1") as caught:
        state_codec.flatten({"registered": {"ema": [0, value]}})
    assert "state_dict()" in caught.value.hint
