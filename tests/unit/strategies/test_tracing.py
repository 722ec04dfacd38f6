"""A graph of a forward pass computes what the forward pass would, every time, or says that it would not."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from lockstep.data.randomness import Generators
from lockstep.errors import ModelError
from lockstep.strategies.stage import Program
from lockstep.strategies.stages import cut
from tests.unit.strategies.test_stages import names, run


@dataclass
class Settings:
    scale: float = 2.0
    sizes: tuple[int, ...] = (1,)

    @functools.cached_property
    def half(self) -> float:
        return self.scale / 2


class Net(nn.Module):
    """Two parts, with something of Python's between them: a method of each class below."""

    shared = 3

    @functools.cached_property
    def shifted(self) -> list[torch.Tensor]:
        return [self.table + 1]

    @functools.cached_property
    def halves(self) -> list[float]:
        return [self.scale / 2, self.scale / 4]

    @functools.cached_property
    def positions(self) -> torch.Tensor:
        return torch.arange(4)

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(4, 4), nn.Linear(4, 4), nn.Dropout(0.5)
        self.register_buffer("table", torch.arange(4.0))
        self.scale, self.unread, self.settings = 2.0, 1, Settings()
        self.factors, self.tensor = [1.0, 2.0], torch.ones(4)
        self.own, self.words = random.Random(1), {"mode": "add"}

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


# --- tensors that forward makes --------------------------------------------------------------------


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


def masks(self: Any, h: torch.Tensor) -> torch.Tensor:
    h = h.masked_fill(torch.ones(4, 4, dtype=torch.bool).triu(1)[2], 0.0)
    return h + torch.tensor(float("nan")).nan_to_num(1.0)


def computes_with_own(self: Any, h: torch.Tensor) -> torch.Tensor:
    return h * self.tensor + self.tensor * 2 + self.table * 2


@pytest.mark.parametrize("between", [adds, adds_twice, writes, masks, computes_with_own])
@pytest.mark.parametrize("split", [None, ["b"]])
def test_tensors_that_forward_makes(between: Any, split: list[str] | None) -> None:
    module = net(between)
    attributes, state = dict(vars(module)), module.state_dict()
    program = cut(module, 2, split)
    assert_same(module, program)
    assert vars(module) == attributes
    assert module.state_dict().keys() == state.keys()


def test_a_tensor_for_two_stages() -> None:
    class Shifting(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shift = torch.arange(4)
            return self.b(self.a(x + shift) * shift + self.tensor) * self.tensor + shift

    module = Shifting()
    assert_same(module, cut(module, 2, None))


def test_constants_are_no_buffers() -> None:
    """Buffers are written to, and travel."""
    program = cut(net(computes_with_own), 2, None)
    assert [n for s in program.stages for n, _ in s.module.named_buffers()] == ["table"]


def test_what_is_computed_of_a_buffer_follows_it() -> None:
    module = net(lambda self, h: h * (self.table + 1))
    program = cut(module, 2, None)
    module.table.add_(1)
    assert_same(module, program)


def test_a_buffer_that_a_pass_changes() -> None:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        self.table.add_(1)
        return h * self.table

    module = net(between)
    program = cut(module, 2, None)
    assert torch.equal(module.table, torch.arange(4.0))  # a trace is no pass
    for passes in range(1, 3):
        x = torch.randn(3, 4)
        found = run(program, x)
        assert torch.equal(found, module.b(module.a(x) * (torch.arange(4.0) + passes)))
    assert torch.equal(module.table, torch.arange(4.0) + 2)


def by_mode(self: Any, h: torch.Tensor) -> torch.Tensor:
    return h + torch.full((4,), 1.0 if self.training else 2.0)


def by_grad(self: Any, h: torch.Tensor) -> torch.Tensor:
    return h * 2 if torch.is_grad_enabled() else h


def after_use(self: Any, h: torch.Tensor) -> torch.Tensor:
    shift = torch.ones(4)
    h = h + shift
    shift += 1
    return h + shift


def views(self: Any, h: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(3, 4)
    return h + out[0] + out[1]


def without_gradients(self: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return h * 2


def in_low_precision(self: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu"):
        return self.a(h)


def with_one_kernel(self: Any, h: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(h, h, h)


def with_one_kernel_first(self: Any, h: torch.Tensor) -> torch.Tensor:
    order = [SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.FLASH_ATTENTION]
    with sdpa_kernel([*order, SDPBackend.CUDNN_ATTENTION], set_priority=True):
        return F.scaled_dot_product_attention(h, h, h)


def with_flags(self: Any, h: torch.Tensor) -> torch.Tensor:
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        return h * 2


@contextmanager
def double() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def in_another_dtype(self: Any, h: torch.Tensor) -> torch.Tensor:
    with double():
        return h * 2


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def with_deterministic_algorithms(self: Any, h: torch.Tensor) -> torch.Tensor:
    with deterministic():
        return h * 2


def caches_symbols(self: Any, h: torch.Tensor) -> torch.Tensor:
    return h * self.shifted[0]


def each_time(self: Any, h: torch.Tensor) -> torch.Tensor:
    return h * random.Random().random()


def sets(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.seen = h
    return h


def counts(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.unread += 1
    return h * 2 if self.unread > 9 else h


def appends(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.factors.append(1.0)
    return h


def draws_of_its_own(self: Any, h: torch.Tensor) -> torch.Tensor:
    return h if self.own.random() < 0.5 else h * 2


@pytest.mark.parametrize(
    ("between", "match"),
    [
        (by_mode, r"in evaluation: a tensor that it makes, of the shape \(4,\), has other values"),
        (by_grad, "other things in training than in evaluation; expected only its parts to"),
        (after_use, "changes a tensor that it has made and used"),
        (views, "has made two tensors in one memory"),
        (without_gradients, r"has a part of it under torch\.no_grad\(\) or torch\.autocast"),
        (in_low_precision, r"has a part of it under torch\.no_grad\(\) or torch\.autocast"),
        (with_one_kernel, r"has a part of it under another choice of kernels, such as sdpa_kernel"),
        (with_one_kernel_first, "under another choice of kernels"),
        (with_flags, "under another choice of kernels"),
        (with_deterministic_algorithms, "under another choice of kernels"),
        (in_another_dtype, "under another default dtype"),
        (
            caches_symbols,
            "changes the cached property shifted, which depends on tensors of the model",
        ),
        (each_time, "does other things each time"),
        (sets, "changes the attribute seen"),
        (counts, "changes the attribute unread"),
        (appends, r"changes Net\.factors"),
        (draws_of_its_own, r"changes Net\.own"),
    ],
)
def test_what_another_pass_would_do_otherwise(between: Any, match: str) -> None:
    module = net(between)
    before = {k: v for k, v in vars(module).items() if k not in ("own", "factors")}
    with pytest.raises(ModelError, match=match) as caught:
        cut(module, 2, None)
    assert "list of modules" in (caught.value.hint or "")
    assert {k: v for k, v in vars(module).items() if k not in ("own", "factors")} == before
    assert all(part.training for part in module.modules())


@pytest.mark.parametrize("written", ["self.table += 1", "self.table = self.table + 1"])
def test_a_buffer_that_is_assigned(written: str) -> None:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        if "+=" in written:
            self.table += 1
        else:
            self.table = self.table + 1
        return h * self.table

    with pytest.raises(ModelError, match=r"the attribute table.* buffers in place, by a") as caught:
        cut(net(between), 2, None)
    assert (caught.value.hint or "").startswith("write self.table.add_(…)")


def decides_by_its_shape(self: Any, h: torch.Tensor) -> torch.Tensor:
    if self.table.dim() != 1 or self.table.ndim != 1 or self.table.numel() != 4:
        raise NotImplementedError
    for place in range(self.table.size(0)):
        h = h + self.table[place]
    return torch.add(h.view(-1, *self.table.shape), self.table).view(-1, *self.table.size())


def test_the_shape_of_a_buffer() -> None:
    module = net(decides_by_its_shape)
    program = cut(module, 2, None)
    module.table.add_(1)
    assert_same(module, program)
    module.table = torch.arange(3.0)
    with pytest.raises(
        ModelError, match=r"^the shape of Net\.table is \(3,\), and was \(4,\) when Net was cut"
    ):
        program.bind((torch.randn(3, 4),), {})


def test_a_default_device_is_kept() -> None:
    """Torch's own mode for it is away while torch handles a call: that is no change of the device."""
    module = net(lambda _, h: torch.relu(h) * 2)
    with torch.device("cpu"):
        program = cut(module, 2, None)
    assert_same(module, program)


# --- draws -----------------------------------------------------------------------------------------

DRAWS = [random.random, np.random.rand, lambda: float(torch.rand(()))]


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("probability", [0.0, 1.0])
def test_a_pass_that_draws_in_python(draw: Any, probability: float) -> None:
    """Whichever way it goes while it is traced."""
    module = net(lambda _, h: h * 2 if draw() < probability else h)
    before = Generators.now()
    with pytest.raises(ModelError, match="draws random numbers itself"):
        cut(module, 2, None)
    assert Generators.now().since(before) is None


class Block(nn.Module):
    """A part that is left out by chance."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))
        self.draw = draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if self.draw() < 0.5 else x


@pytest.mark.parametrize("draw", DRAWS)
def test_a_part_that_draws_stays_whole(draw: Any) -> None:
    module = Wrapped(Block(draw))
    before = Generators.now()
    program = cut(module, 2, None)
    assert names(program) == [("part", "part"), ("head", "head")]
    assert Generators.now().since(before) is None


class Wrapped(nn.Module):
    """A heavy part, and a light one."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part, self.head = part, nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.part(x))


def test_a_part_that_asks_for_its_mode_stays_whole() -> None:
    class Halving(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * (1.0 if self.training else 0.5)

    assert names(cut(Wrapped(Halving(None)), 2, None)) == [("part", "part"), ("head", "head")]


def test_draws_like_a_tensor() -> None:
    module = net(lambda _, h: h + torch.rand_like(h))
    program = cut(module, 2, None)
    x = torch.randn(3, 4)
    torch.manual_seed(1)
    expected = module(x)
    torch.manual_seed(1)
    assert torch.equal(run(program, x), expected)
