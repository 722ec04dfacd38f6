"""bf16 inside forward passes, fp32 outside (A17)."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from lockstep.engine.strategies.precision import autocast_forward


class Output(NamedTuple):
    logits: torch.Tensor
    index: torch.Tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.inside: list[torch.dtype] = []

    def forward(self, x: torch.Tensor, shape: str = "tensor"):
        y = self.linear(x)
        self.inside.append(y.dtype)
        if shape == "fail":
            raise ZeroDivisionError
        return {
            "tensor": y,
            "tuple": (y, 3, "text"),
            "named": Output(y, torch.arange(2)),
            "dict": {"deep": [y, None]},
        }[shape]


@pytest.fixture
def net() -> Net:
    net = Net()
    autocast_forward(net, "cpu", torch.bfloat16)
    return net


def test_inside_is_bf16_and_outside_fp32(net: Net) -> None:
    x = torch.randn(2, 4)
    y = net(x)
    assert net.inside == [torch.bfloat16]
    assert y.dtype == torch.float32
    assert torch.equal(y, y.bfloat16().float()), "the values are those of bf16"
    assert not torch.is_autocast_enabled("cpu")
    y.sum().backward()
    assert net.linear.weight.dtype == net.linear.weight.grad.dtype == torch.float32


def test_outputs_of_any_shape(net: Net) -> None:
    x = torch.randn(2, 4)
    first, number, text = net(x, "tuple")
    assert (first.dtype, number, text) == (torch.float32, 3, "text")
    named = net(x, "named")
    assert type(named) is Output
    assert (named.logits.dtype, named.index.dtype) == (torch.float32, torch.int64)
    deep, nothing = net(x, "dict")["deep"]
    assert (deep.dtype, nothing) == (torch.float32, None)


def test_autocast_is_off_after_an_exception(net: Net) -> None:
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            net(torch.randn(2, 4), "fail")
        assert not torch.is_autocast_enabled("cpu")
    assert net(torch.randn(2, 4)).dtype == torch.float32


def test_a_module_inside_itself(net: Net) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(self.net(x))

    outer = Twice()
    autocast_forward(outer, "cpu", torch.bfloat16)
    assert outer(torch.randn(2, 4)).dtype == torch.float32
    assert not torch.is_autocast_enabled("cpu")
