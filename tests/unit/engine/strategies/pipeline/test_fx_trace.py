"""A graph of a forward pass computes what the forward pass would; what it is seen not to do is refused."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lockstep.engine.data.randomness import Generators
from lockstep.engine.strategies.pipeline.partition import cut
from lockstep.engine.strategies.pipeline.stage import Program
from lockstep.errors import ModelError
from tests.unit.engine.strategies.pipeline.test_partition import names, run


class Net(nn.Module):
    """Two parts, with something of Python's between them: a function of each test below."""

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        return torch.arange(4) + self.table

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("table", torch.arange(4.0))
        self.tensor, self.calls = torch.ones(4), 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.between(self.a(x)))

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h


def net(between: Any) -> nn.Module:
    """Return a model that does `between`, a function of the model and what has come so far."""
    return type("Net", (Net,), {"between": between})()


def gradients(module: nn.Module, output: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(output.sum(), list(module.parameters())))


def assert_same(module: nn.Module, program: Program) -> None:
    for _ in range(2):  # what a pass leaves behind would be there in the second one
        x = torch.randn(3, 4)
        expected, found = module(x), run(program, x)
        assert torch.equal(expected, found)
        pairs = zip(gradients(module, expected), gradients(module, found), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)


# --- what a graph keeps ----------------------------------------------------------------------------


def adds(self: Any, h: torch.Tensor) -> torch.Tensor:
    return h + torch.arange(4) * torch.tensor([1.0, float("nan"), 1, 1]).nan_to_num(0)


def adds_twice(self: Any, h: torch.Tensor) -> torch.Tensor:
    shift = torch.arange(4)
    return self.a(h + shift) * shift


def writes(self: Any, h: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(3, 4)
    out[1:] = h[1:]
    out += h
    return out


def computes_with_own(self: Any, h: torch.Tensor) -> torch.Tensor:
    return h * self.tensor + self.tensor * 2 + self.table * 2 + self.positions


@pytest.mark.parametrize("between", [adds, adds_twice, writes, computes_with_own])
@pytest.mark.parametrize("split", [None, ["b"]])
def test_tensors_that_forward_makes(between: Any, split: list[str] | None) -> None:
    module = net(between)
    attributes, state = dict(vars(module)), module.state_dict()
    program = cut(module, 2, split)
    assert vars(module) == attributes
    assert module.state_dict().keys() == state.keys()
    buffers = [n for s in program.stages for n, _ in s.module.named_buffers()]
    assert set(buffers) <= {"table"}, "a constant is no buffer: those are written to, and travel"
    assert_same(module, program)


def test_buffers_are_those_of_each_pass() -> None:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        self.table.add_(1)
        return h * (self.table + 1)

    module = net(between)
    program = cut(module, 2, None)
    assert torch.equal(module.table, torch.arange(4.0))  # a trace is no pass
    for passes in range(1, 3):
        x = torch.randn(3, 4)
        found = run(program, x)
        assert torch.equal(found, module.b(module.a(x) * (torch.arange(4.0) + passes + 1)))


def test_draws_like_a_tensor() -> None:
    module = net(lambda _, h: h + torch.rand_like(h))
    program = cut(module, 2, None)
    x = torch.randn(3, 4)
    torch.manual_seed(1)
    expected = module(x)
    torch.manual_seed(1)
    assert torch.equal(run(program, x), expected)


# --- what shows, and is refused --------------------------------------------------------------------


def by_mode(self: Any, h: torch.Tensor) -> torch.Tensor:
    return h + torch.full((4,), 1.0 if self.training else 2.0)


def by_grad(self: Any, h: torch.Tensor) -> torch.Tensor:
    return h * 2 if torch.is_grad_enabled() else h


def drops(self: Any, h: torch.Tensor) -> torch.Tensor:
    return F.dropout(h, 0.5, self.training)


def asks_for_values(self: Any, h: torch.Tensor) -> torch.Tensor:
    return h if h.mean() > 0 else -h


def without_gradients(self: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return h * 2


def in_low_precision(self: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu"):
        return self.a(h)


def sets(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.seen = h
    return h


def counts(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.calls += 1
    return h


def assigns_a_buffer(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.table += 1
    return h


def draws(draw: Any, probability: float) -> Any:
    return lambda _, h: h * 2 if draw() < probability else h


DRAWS = [random.random, np.random.rand, lambda: float(torch.rand(()))]


@pytest.mark.parametrize(
    ("between", "match"),
    [
        (by_mode, "does other things in training than in evaluation"),
        (by_grad, "does other things in training than in evaluation"),
        (drops, "does other things in training than in evaluation"),
        (asks_for_values, "forward cannot be traced"),
        (without_gradients, r"under torch\.no_grad\(\) or torch\.autocast"),
        (in_low_precision, r"under torch\.no_grad\(\) or torch\.autocast"),
        (sets, "sets the attribute seen"),
        (counts, "sets the attribute calls"),
        (assigns_a_buffer, "sets the attribute table|cannot be traced"),
        *((draws(draw, p), "draws random numbers itself") for draw in DRAWS for p in (0.0, 1.0)),
    ],
)
def test_what_another_pass_would_do_otherwise(between: Any, match: str) -> None:
    module = net(between)
    module.a.eval()
    before, stood = dict(vars(module)), Generators.now()
    with pytest.raises(ModelError, match=match) as caught:
        cut(module, 2, None)
    assert "list of modules" in (caught.value.hint or "")
    assert vars(module) == before
    assert (module.training, module.a.training, module.b.training) == (True, False, True)
    assert Generators.now().since(stood) is None


def test_a_forward_pass_with_any_number_of_arguments() -> None:
    class Open(Net):
        def forward(self, *x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x[0]))

    with pytest.raises(ModelError, match="takes any number of arguments"):
        cut(Open(), 2, None)


# --- parts that stay whole -------------------------------------------------------------------------


class Block(nn.Module):
    """A part that does `act` with what is inside of it."""

    def __init__(self, act: Any) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self, x)


class Wrapped(nn.Module):
    """A heavy part, and a light one."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.head = part, nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.part(x))


@pytest.mark.parametrize(
    "act",
    [
        lambda self, x: self.inner(x) if x.sum() > 0 else x,
        lambda self, x: self.inner(x) * (1.0 if self.training else 0.5),
        *(lambda self, x, d=draw: self.inner(x) if d() < 0.5 else x for draw in DRAWS),
    ],
)
def test_a_part_that_cannot_be_traced_stays_whole(act: Any) -> None:
    module, before = Wrapped(Block(act)), Generators.now()
    program = cut(module, 2, None)
    assert names(program) == [("part", "part"), ("head", "head")]
    assert Generators.now().since(before) is None
