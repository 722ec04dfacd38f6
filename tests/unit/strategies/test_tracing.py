"""A graph of a forward pass computes what the forward pass would, every time, or says that it would not."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lockstep.data.randomness import Generators
from lockstep.errors import ModelError
from lockstep.strategies.stage import Program
from lockstep.strategies.stages import cut
from tests.unit.strategies.test_stages import names, run


@dataclass
class Settings:
    scale: float = 2.0
    sizes: tuple[int, ...] = (1,)


class Net(nn.Module):
    """Two parts, with something of Python's between them: a method of each class below."""

    shared = 3

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


# --- attributes ------------------------------------------------------------------------------------


def change(module: Any, text: str, value: Any) -> None:
    owner, _, name = text.rpartition(".")
    setattr(module.get_submodule(owner) if owner != "settings" else module.settings, name, value)


@pytest.mark.parametrize(
    ("between", "name", "value", "match"),
    [
        (
            lambda self, h: h * self.scale,
            "scale",
            0.5,
            r"^Net\.scale is 0\.5, and was 2\.0 when Net",
        ),
        (lambda self, h: h * self.scale, "scale", 2, r"Net\.scale is 2, and was 2\.0"),
        (lambda self, h: h * self.shared, "shared", 4, r"Net\.shared is 4, and was 3"),
        (lambda self, h: h * getattr(self, "late", 1), "late", 2, r"late is 2, and was nothing"),
        (lambda self, h: h if self.words["mode"] == "add" else -h, "words", {}, r"words is {}"),
        (
            lambda self, h: h * self.drop.p,
            "drop.p",
            0.1,
            r"drop\.p of Dropout is 0\.1, and was 0\.5",
        ),
        (lambda self, h: h * self.settings.scale, "settings.scale", 1.0, r"Settings\(scale=1\.0"),
        (lambda self, h: h * self.tensor, "tensor", torch.zeros(4), r"Net\.tensor is tensor\("),
        (lambda self, h: h * sum(self.factors), "factors", [1.0, 3.0], r"\[1\.0, 3\.0\], and was"),
    ],
)
def test_what_forward_reads_must_stay(between: Any, name: str, value: Any, match: str) -> None:
    module, x = net(between), torch.randn(3, 4)
    program = cut(module, 2, None)
    assert_same(module, program)
    change(module, name, value)
    with pytest.raises(ModelError, match=match) as caught:
        program.only(1).bind((x,), {})
    assert "nn.Sequential" in (caught.value.hint or "")


def test_a_tensor_that_is_changed_in_place() -> None:
    module = net(lambda self, h: h + self.tensor * 2)
    program = cut(module, 2, None)
    module.tensor.add_(1)
    with pytest.raises(
        ModelError, match=r"Net\.tensor is tensor\(\[2\., .*, and was tensor\(\[1\., "
    ):
        program.bind((torch.randn(3, 4),), {})
    module.tensor.sub_(1)  # which is the same value, and nobody looks
    with pytest.raises(ModelError, match=r"Net\.tensor, tensor\(.*, is not what it was"):
        program.bind((torch.randn(3, 4),), {})


def test_an_attribute_of_a_part_that_is_looked_into() -> None:
    class Scaled(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.draw

    module = Wrapped(Scaled(2.0))
    program = cut(module, 2, ["part.inner.1"])
    module.part.draw = 3.0
    with pytest.raises(ModelError, match=r"part\.draw of Scaled is 3\.0, and was 2\.0"):
        program.bind((torch.randn(3, 4),), {})
    module = Wrapped(Scaled(2.0))
    program = cut(module, 2, ["head"])  # the part stays whole, and reads it each time
    module.part.draw = 3.0
    assert_same(module, program)


def test_what_forward_does_not_read_may_change() -> None:
    module = net(lambda self, h: self.layers[0](h * self.scale))
    module.layers = [module.drop.eval()]  # whose repr reads p
    program = cut(module, 2, None)
    module.unread, module.new, module.drop.p = 7, "x", 0.1
    module.eval()
    module.register_forward_hook(lambda *_: None)
    assert_same(module, program)


def test_nothing_is_read_after_a_trace() -> None:
    cut(net(adds), 2, None)
    with pytest.raises(ModelError):
        cut(net(sets), 2, None)
    assert "__getattribute__" not in vars(nn.Module)
