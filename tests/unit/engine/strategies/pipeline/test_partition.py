"""Models cut into stages compute what they did before; what cannot be cut says so."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.engine.strategies.checks import as_module
from lockstep.engine.strategies.pipeline.partition import cut
from lockstep.engine.strategies.pipeline.stage import Program, weight
from lockstep.errors import ModelError, UsageError
from tests.vision import resnet18


def run(program: Program, *args: Any, **kwargs: Any) -> Any:
    """Go through the stages in this process, with nothing but what each hands to the next."""
    inputs = program.bind(args, kwargs)
    came: dict[str, Any] = {}
    for stage in program.stages:
        values = {**inputs, **came}
        given = stage.module(*(values[name] for name in stage.takes))
        values |= dict(zip(stage.gives, given, strict=True))
        came = {name: values[name] for name in stage.keeps}
    return given[0]


def names(program: Program) -> list[tuple[str, str]]:
    return [(stage.first, stage.last) for stage in program.stages]


def row() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))


class Skipping(nn.Module):
    """A value of the first part is used by the last one, and so is an input."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.scale = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor, shift: torch.Tensor, factor: float = 1.0) -> dict[str, Any]:
        a = self.first(x)
        b = self.second(F.relu(a))
        c = self.third(b) + a * self.scale + shift
        return {"sum": c * factor, "parts": (b, a)}


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_a_row_is_cut_between_its_modules(count: int) -> None:
    model, x = row(), torch.randn(3, 4)
    program = cut(model, count, None)
    assert len(program.stages) == count
    assert torch.equal(run(program, x), model(x))


def test_which_modules_go_where() -> None:
    model = as_module([nn.Linear(4, 100), nn.Flatten(), nn.Linear(100, 2)])
    assert names(cut(model, 3, None)) == [("0", "0"), ("1", "1"), ("2", "2")]
    assert names(cut(row(), 3, ["1", "4"])) == [("0", "0"), ("1", "3"), ("4", "4")]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_values_that_skip_stages(count: int) -> None:
    model = Skipping()
    x, shift = torch.randn(3, 4), torch.randn(3, 4)
    expected, found = model(x, shift), run(cut(model, count, None), x, shift=shift)
    assert torch.equal(found["sum"], expected["sum"])
    assert all(map(torch.equal, found["parts"], expected["parts"]))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_resnet18_in_training_and_evaluation(count: int) -> None:
    model, x = resnet18(num_classes=4), torch.randn(2, 3, 32, 32)
    program = cut(model, count, None)
    held = [id(p) for stage in program.stages for p in stage.module.parameters()]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    whole = sum(p.numel() * 4 for p in model.parameters())
    assert max(weight(stage.module) for stage in program.stages) < 1.7 * whole / count
    for training in (True, False):
        model.train(training)
        assert torch.equal(run(program, x), model(x))


def test_places_inside_of_parts() -> None:
    model, x = resnet18(num_classes=4), torch.randn(2, 3, 32, 32)
    program = cut(model, 3, ["layer2", "layer4.1.conv2"])
    first, second, third = (stage.first for stage in program.stages)
    assert (first, second.split(".")[0], third) == ("conv1", "layer2", "layer4.1.conv2")
    assert torch.equal(run(program, x), model(x))


def test_parameters_of_other_stages_are_let_go_of() -> None:
    """A graph that uses a parameter directly has it, too."""
    program = cut(Skipping(), 3, None)
    held = weakref.ref(program.stages[2].module)
    program = program.only(0)
    gc.collect()
    assert held() is None
    has = [bool(list(stage.module.parameters())) for stage in program.stages]
    assert has == [True, False, False]


# --- what cannot be cut ----------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    return model


@pytest.mark.parametrize(
    ("model", "count", "split", "kind", "match"),
    [
        (nn.Sequential(nn.ReLU()), 3, None, UsageError, "stages don't fit ranks: 1 modules in"),
        (nn.Sequential(), 3, None, UsageError, "pipeline stages don't fit ranks"),
        (Small(), 2, None, UsageError, "Small has 1 parts with parameters"),
        (row(), 3, ["1"], UsageError, "1 places, which makes 2 stages; each model has 3"),
        (row(), 2, "layer2", UsageError, "expected a list of names"),
        (row(), 2, 3, UsageError, "expected a list of names"),
        (row(), 2, {"1"}, UsageError, "expected a list of names"),
        (row(), 2, ["9"], ModelError, "has no such part; expected one of 0, 1"),
        (row(), 2, ["0"], ModelError, "split is 0; expected parts in the order"),
        (Skipping(), 2, ["fourth"], ModelError, "split names 'fourth'"),
        (Skipping(), 2, ["first"], ModelError, "split is first; expected parts in the order"),
        (Skipping(), 3, ["third", "second"], ModelError, "split is third, second"),
        (tied(), 2, None, ModelError, r"0\.weight is used in stages 0 and 1"),
    ],
)
def test_what_cannot_be_cut(
    model: nn.Module, count: int, split: Any, kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match):
        cut(model, count, split)


def test_an_argument_that_the_cut_was_not_made_for() -> None:
    program = cut(Skipping(), 2, None)
    x = torch.randn(2, 4)
    with pytest.raises(ModelError, match=r"called with another factor than 1\.0"):
        program.bind((x, x, 2.0), {})


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (3, "run.model was given a int; expected a Module or a list of Modules"),
        ([], "run.model was given a list"),
        ([nn.Linear(1, 1), torch.relu], "entry 1 of the list given to run.model is a builtin"),
    ],
)
def test_what_is_no_model(model: Any, match: str) -> None:
    with pytest.raises(ModelError, match=match):
        as_module(model)
