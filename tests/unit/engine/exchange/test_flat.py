"""Where gradients lie in a flat tensor: as in a bucket of DistributedDataParallel."""

from __future__ import annotations

import pytest
import torch

from lockstep.engine.exchange.flat import (
    FlatLayout,
    as_real,
    as_typed,
    form,
    same_layout,
    shape_in_memory,
)

PARAMETERS = {
    "contiguous": torch.zeros(2, 3),
    "a number": torch.zeros(()),
    "empty": torch.zeros(0, 3),
    "channels last": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": torch.zeros(3, 4).t(),
    "gaps": torch.zeros(8, 3)[::2],
    "expanded": torch.zeros(3, 1).expand(3, 4),
    "complex": torch.zeros(3, 4, dtype=torch.complex64),
    "complex and transposed": torch.zeros(3, 4, dtype=torch.complex128).t(),
    "complex and conjugated": torch.zeros(3, 4, dtype=torch.complex64).conj(),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_part_holds_a_gradient_and_gives_it_back(name: str) -> None:
    first, parameter = torch.zeros(3), PARAMETERS[name]
    gradient = torch.randn(parameter.shape, dtype=parameter.dtype)
    parts = FlatLayout([form(first), form(parameter)])
    size = parts.size
    flat = torch.zeros(size + 1, dtype=parameter.dtype.to_real())  # notes may follow
    _, part = parts.of(flat)
    assert part.shape == as_real(parameter).shape
    part.copy_(as_real(gradient))
    assert torch.equal(as_typed(part, parameter), gradient)
    assert not flat[:3].any()
    assert not flat[size:].any()
    assert flat.count_nonzero() == size - 3, "no element lies on another"


def test_elements_lie_as_those_of_the_parameter_do() -> None:
    for name in ("channels last", "transposed"):
        parameter = torch.randn(120)[: PARAMETERS[name].numel()]
        same = parameter.as_strided(PARAMETERS[name].shape, PARAMETERS[name].stride())
        flat = torch.zeros(same.numel())
        FlatLayout([form(same)]).of(flat)[0].copy_(same)
        assert torch.equal(flat, parameter)


def test_where_there_are_gaps_elements_lie_in_the_order_of_indices() -> None:
    flat = torch.arange(12.0)
    (part,) = FlatLayout([form(PARAMETERS["gaps"])]).of(flat)
    assert torch.equal(part, flat.view(4, 3))


def test_a_bucket_that_is_complex_itself() -> None:
    parameter, gradient = PARAMETERS["complex"], torch.randn(3, 4, dtype=torch.complex64)
    flat = torch.zeros(12, dtype=torch.complex64)
    FlatLayout([form(parameter)]).of(flat)[0].copy_(as_real(gradient))
    assert torch.equal(flat.view(3, 4), gradient)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("contiguous", (2, 3)),
        ("a number", ()),
        ("channels last", (2, 4, 5, 3)),
        ("transposed", (3, 4)),
        ("gaps", (4, 3)),
        ("complex", (3, 4, 2)),
    ],
)
def test_shape_in_the_order_of_memory(name: str, shape: tuple[int, ...]) -> None:
    assert shape_in_memory(PARAMETERS[name]) == shape


def test_parts_of_a_flat_tensor_that_is_a_part_itself() -> None:
    """As a slot of shared memory is, and one with other numbers before and behind it."""
    memory = torch.zeros(10)
    (part,) = FlatLayout([form(PARAMETERS["contiguous"])]).of(memory[3:9])
    part.fill_(1)
    assert memory.tolist() == [0] * 3 + [1] * 6 + [0]


@pytest.mark.parametrize(
    ("shape", "alike"),
    [((2, 3, 4, 5), False), ((2, 3, 1, 1), True), ((2, 1, 4, 5), True), ((1, 3, 4, 5), False)],
)
def test_channels_last_of_one_channel_or_one_pixel_is_the_same(
    shape: tuple[int, ...], alike: bool
) -> None:
    parameter = torch.zeros(shape)
    turned = parameter.to(memory_format=torch.channels_last)
    assert same_layout(form(parameter), form(turned)) == alike
    assert same_layout(form(turned), form(turned))


def test_gaps_that_are_closed_change_no_order() -> None:
    gaps = PARAMETERS["gaps"]
    assert same_layout(form(gaps), form(gaps.contiguous()))
