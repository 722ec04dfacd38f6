"""Tensors in rows of bytes, and optimizers as JSON."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.optim import Optimizer

from lockstep.engine.parameter_server import optimizer_codec
from lockstep.engine.parameter_server.messages import HEADER, Header, Kind, parse, pieces, view
from lockstep.engine.parameter_server.remote_optimizer import deal
from lockstep.engine.parameter_server.rows import RowLayout
from lockstep.errors import ModelError


def tensors() -> list[torch.Tensor]:
    return [
        torch.randn(3, 4),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(7, dtype=torch.float64),
        torch.randn(5).to(torch.bfloat16),
        torch.tensor(3.0),
        torch.arange(6).reshape(2, 3).t(),
        torch.randn(10)[::2],
        torch.tensor([True, False]),
        torch.empty(0, 3),
    ]


def test_a_row_keeps_values_and_the_order_in_memory() -> None:
    values = tensors()
    rows = RowLayout.of(values)
    assert rows.bytes % 64 == 0
    for one, found in zip(values, rows.views(rows.row(values)), strict=True):
        assert (found.dtype, found.shape) == (one.dtype, one.shape)
        assert torch.equal(found, one)
    strides = [found.stride() for found in rows.views(rows.row(values))]
    assert strides[1] == values[1].stride(), "channels last stays so"
    assert strides[5] == values[5].stride(), "and what is transposed"
    assert strides[6] == (1,), "but there are no gaps"


def test_no_two_tensors_share_memory() -> None:
    rows = RowLayout.of(tensors())
    row = torch.zeros(rows.bytes, dtype=torch.uint8)
    for place in rows.views(row):
        assert not place.any()
        place.fill_(1)


def test_segments_cover_all_elements_of_a_type() -> None:
    values = [torch.ones(3), torch.ones(2, dtype=torch.float64), torch.ones(5)]
    rows = RowLayout.of(values)
    sizes = [(one.dtype, one.numel()) for one in rows.segments(rows.row(values))]
    assert sizes == [(torch.float64, 2), (torch.float32, 8)]


def test_complex_numbers_are_summed_as_two_real_ones() -> None:
    """Torch multiplies what it adds to a complex number by one: -0.0 would be 0.0 afterwards."""
    one, other = (torch.full((3,), complex(-0.0, -0.0)) for _ in range(2))
    rows = RowLayout.of([one])
    (total,), (added,) = (rows.segments(rows.row([values])) for values in (one, other))
    total.add_(added)
    assert total.dtype == torch.float32
    assert total.signbit().all()


def test_layouts_go_through_json() -> None:
    rows = RowLayout.of(tensors())
    words = json.loads(json.dumps(rows.words()))
    assert RowLayout.parse(words)._specs == rows._specs


def test_a_message_says_how_long_it_is() -> None:
    data = b"".join(
        pieces(
            Kind.PUSH,
            [torch.ones(3), torch.empty(0)],
            tag=2,
            number=5,
            place=1 << 60,
            meta={"a": 1},
        )
    )
    header = Header.unpack(data[: HEADER.size])
    assert (header.kind, header.tag, header.number, header.place) == (Kind.PUSH, 2, 5, 1 << 60)
    assert HEADER.size + header.meta + header.payload == len(data)
    text = data[HEADER.size : HEADER.size + header.meta]
    assert parse(text) == {"a": 1}
    assert data[HEADER.size + header.meta :] == bytes(view(torch.ones(3)))


def test_json_that_is_no_object() -> None:
    with pytest.raises(ValueError, match="expected a JSON object"):
        parse(b"[1]")


# --- optimizers -------------------------------------------------------------------------------------

EVERY = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
)


@pytest.mark.parametrize("name", EVERY)
def test_every_optimizer_of_torch_can_be_made_anew(name: str) -> None:
    parameter = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = getattr(torch.optim, name)([parameter])
    words = json.loads(
        json.dumps([optimizer_codec.describe(optimizer), optimizer_codec.settings_of(optimizer)])
    )
    made = optimizer_codec.build(words[0], [[torch.nn.Parameter(torch.ones(2, 2))]])
    optimizer_codec.set_settings(made, words[1])
    assert type(made) is type(optimizer)
    assert made.state_dict()["param_groups"] == optimizer.state_dict()["param_groups"]


def test_numbers_that_json_has_no_word_for() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=math.inf)
    words = json.loads(json.dumps(optimizer_codec.settings_of(optimizer)))
    assert words[0]["lr"] == math.inf


def test_a_rate_that_is_a_tensor() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=torch.tensor(0.1))
    with pytest.raises(ModelError, match="lr of the optimizer is a Tensor; expected a number"):
        optimizer_codec.describe(optimizer)


def test_a_class_of_the_script() -> None:
    kind = type("Mine", (torch.optim.SGD,), {"__module__": "__main__"})
    with pytest.raises(
        ModelError, match="class Mine is defined in the script; expected one in a module"
    ):
        optimizer_codec.describe(kind([torch.nn.Parameter(torch.ones(1))]))


def test_a_class_in_a_function() -> None:
    class Local(torch.optim.SGD):
        pass

    with pytest.raises(ModelError, match="is defined in the script"):
        optimizer_codec.describe(Local([torch.nn.Parameter(torch.ones(1))]))


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        ("builtins", "dict", "builtins.dict is no torch.optim.Optimizer"),
        ("os", "system", "os.system is no torch.optim.Optimizer"),
        ("torch.optim", "Nothing", "a server cannot import the optimizer Nothing from torch.optim"),
        ("not_a_module_at_all", "Mine", "a server cannot import the optimizer Mine"),
    ],
)
def test_what_is_no_optimizer(module: str, name: str, message: str) -> None:
    words = {"module": module, "name": name, "root": None, "defaults": {}}
    with pytest.raises(ModelError, match=message):
        optimizer_codec.build(words, [])


def test_state_that_is_no_tensor_and_no_number() -> None:
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter] = {"step": 3, "buffer": torch.ones(2)}
    words, row = optimizer_codec.pack(optimizer, [parameter])
    (state,) = optimizer_codec.unpack(words, row).values()
    assert state["step"] == 3
    assert torch.equal(state["buffer"], torch.ones(2))
    optimizer.state[parameter]["odd"] = {"a": 1}
    with pytest.raises(ModelError, match="odd of the optimizer is a dict"):
        optimizer_codec.pack(optimizer, [parameter])


# --- which server has which parameters ----------------------------------------------------------------


def test_the_largest_first_and_each_to_who_has_the_least() -> None:
    assert deal([1, 8, 4, 4, 1], 2) == [0, 0, 1, 1, 1]
    assert deal([5, 5, 5], 1) == [0, 0, 0]
    assert deal([3, 2], 4) == [0, 1]
    assert deal([], 2) == []


def test_loads_differ_by_less_than_the_largest() -> None:
    sizes = [(7 * i * i) % 101 for i in range(40)]
    owners = deal(sizes, 3)
    loads = [sum(s for s, o in zip(sizes, owners, strict=True) if o == k) for k in range(3)]
    assert sum(loads) == sum(sizes)
    assert max(loads) - min(loads) < max(sizes)
