"""What a traced forward pass has read of its modules must stay what it was."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from lockstep.errors import ModelError
from lockstep.strategies.reads import Reads
from lockstep.strategies.stages import cut
from tests.unit.strategies.test_tracing import (
    Block,
    Settings,
    Wrapped,
    adds,
    assert_same,
    net,
    sets,
)


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


def test_cached_properties() -> None:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            h = h * self.halves[1] + self.positions * self.settings.half
        return h

    module = net(between)
    program = cut(module, 2, None)
    assert "halves" not in vars(module)
    assert_same(module, program)  # the module's own pass computes them
    module.settings = Settings(3.0)
    with pytest.raises(ModelError, match=r"Net\.settings is Settings\(scale=3\.0"):
        program.bind((torch.randn(3, 4),), {})
    module = net(lambda self, h: h * self.halves[0])
    program = cut(module, 2, None)
    module.scale = 3.0
    with pytest.raises(ModelError, match=r"Net\.scale is 3\.0, and was 2\.0"):
        program.bind((torch.randn(3, 4),), {})


def test_a_cached_property_that_was_there_must_stay() -> None:
    module = net(lambda self, h: h * self.halves[0])
    assert module.halves == [1.0, 0.5]
    program = cut(module, 2, None)
    assert_same(module, program)
    module.halves[0] = 3.0
    with pytest.raises(ModelError, match=r"Net\.halves is \[3\.0, 0\.5\], and was \[1\.0, 0\.5\]"):
        program.bind((torch.randn(3, 4),), {})


def test_a_cached_property_that_a_pass_changes() -> None:
    def between(self: Any, h: torch.Tensor) -> torch.Tensor:
        self.positions.add_(1)
        return h * self.positions

    with pytest.raises(ModelError, match=r"changes Net\.positions"):
        cut(net(between), 2, None)


LONG = 1000


@pytest.mark.parametrize("inner", [[0.5] * LONG, dict.fromkeys(range(LONG), 0.5), [0.5] * 8])
@pytest.mark.parametrize("around", [lambda x: x, lambda x: [[[x]]], lambda x: Settings(sizes=(x,))])
def test_long_and_deep_settings(inner: Any, around: Any) -> None:
    module, inner = net(lambda self, h: h * 2 if self.factors else h), copy.copy(inner)
    module.factors = around(inner)
    program = cut(module, 2, None)
    assert_same(module, program)
    inner[5] = -0.5  # as many entries as before
    with pytest.raises(ModelError, match=r"^Net\.factors"):
        program.bind((torch.randn(3, 4),), {})


def test_a_long_set_has_no_order() -> None:
    module = net(lambda self, h: h * 2 if self.factors else h)
    module.factors = {str(number) for number in range(LONG)}
    program = cut(module, 2, None)
    module.factors = {str(number) for number in reversed(range(LONG))}
    assert_same(module, program)
    module.factors.remove("5")
    module.factors.add("x")
    with pytest.raises(ModelError, match=r"Net\.factors"):
        program.bind((torch.randn(3, 4),), {})


def test_what_is_told_by_its_identity_is_kept_alive() -> None:
    """Else another object could come to lie where it was, and pass for it."""
    module = net(None)
    module.factors = [torch.ones(4)]
    first = weakref.ref(module.factors[0])
    reads = Reads(module)
    reads.note(module, "factors")
    module.factors[0] = torch.zeros(4)
    assert first() is not None
    assert [name for name, *_ in reads.changed()] == ["Net.factors"]


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
