"""Models cut into stages compute what they did before."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lockstep.errors import ModelError, UsageError
from lockstep.strategies.checks import as_module
from lockstep.strategies.stage import Program
from lockstep.strategies.stages import cut
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
def test_a_row_is_cut_between_its_modules(count):
    model, x = row(), torch.randn(3, 4)
    program = cut(model, count, None)
    assert len(program.stages) == count
    assert torch.equal(run(program, x), model(x))


def test_a_row_with_as_many_modules_as_ranks_is_taken_as_it_is():
    model = as_module([nn.Linear(4, 100), nn.Flatten(), nn.Linear(100, 2)])
    assert names(cut(model, 3, None)) == [("0", "0"), ("1", "1"), ("2", "2")]


def test_cuts_that_are_named():
    assert names(cut(row(), 3, ["1", "4"])) == [("0", "0"), ("1", "3"), ("4", "4")]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_values_that_skip_stages(count):
    model = Skipping()
    x, shift = torch.randn(3, 4), torch.randn(3, 4)
    program = cut(model, count, None)
    expected, found = model(x, shift), run(program, x, shift=shift)
    assert torch.equal(found["sum"], expected["sum"])
    assert all(map(torch.equal, found["parts"], expected["parts"]))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_resnet18_in_training_and_evaluation(count):
    model, x = resnet18(num_classes=4), torch.randn(2, 3, 32, 32)
    program = cut(model, count, None)
    heaviest = max(stage.bytes for stage in program.stages)
    whole = sum(p.numel() * 4 for p in model.parameters())
    assert heaviest < 1.7 * whole / count
    for training in (True, False):
        model.train(training)
        assert torch.equal(run(program, x), model(x))


def test_places_inside_of_parts():
    model, x = resnet18(num_classes=4), torch.randn(2, 3, 32, 32)
    program = cut(model, 3, ["layer2", "layer4.1.conv2"])
    assert [stage.first for stage in program.stages] == ["conv1", "layer2.0", "layer4.1.conv2"] or [
        stage.first for stage in program.stages
    ] == ["conv1", "layer2", "layer4.1.conv2"]
    assert torch.equal(run(program, x), model(x))


def test_stages_are_made_of_the_models_own_parts():
    model = resnet18(num_classes=4)
    own = {id(p) for p in model.parameters()}
    held = [id(p) for stage in cut(model, 3, None).stages for p in stage.module.parameters()]
    assert sorted(held) == sorted(own)


def test_parameters_of_other_stages_are_let_go_of():
    """A graph that uses a parameter directly has it, too."""
    program = cut(Skipping(), 3, None)
    held = weakref.ref(program.stages[2].module)
    program = program.only(0)
    gc.collect()
    assert held() is None
    assert [bool(list(stage.module.parameters())) for stage in program.stages] == [
        True,
        False,
        False,
    ]


def test_a_part_that_cannot_be_traced_stays_whole():
    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) if x.sum() > 0 else x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.careful, self.head = Careful(), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.careful(x))

    assert names(cut(Net(), 2, None)) == [("careful", "careful"), ("head", "head")]


# --- what cannot be cut ----------------------------------------------------------------------------


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(2, 2), nn.ReLU()), nn.Sequential()])
def test_fewer_modules_than_ranks(model):
    with pytest.raises(UsageError, match="pipeline stages don't fit ranks"):
        cut(model, 3, None)


def test_fewer_parts_than_ranks():
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)

    with pytest.raises(UsageError, match="Small has 1 parts with parameters"):
        cut(Small(), 2, None)


def test_another_number_of_cuts_than_the_ranks_need():
    with pytest.raises(
        UsageError, match="split names 1 places, which makes 2 stages; each model has 3"
    ):
        cut(row(), 3, ["1"])


@pytest.mark.parametrize(
    ("model", "split", "match"),
    [
        (row(), ["9"], "split names '9', and the model has no such part; expected one of 0, 1"),
        (row(), ["0"], "split is 0; expected parts in the order"),
        (Skipping(), ["fourth"], "split names 'fourth'"),
        (Skipping(), ["first"], "split is first; expected parts in the order"),
    ],
)
def test_cuts_at_wrong_places(model, split, match):
    with pytest.raises(ModelError, match=match):
        cut(model, 2, split)


@pytest.mark.parametrize("split", ["layer2", 3, {"1"}])
def test_cuts_that_are_no_list(split):
    with pytest.raises(UsageError, match="expected a list of names"):
        cut(row(), 2, split)


def test_cuts_in_another_order():
    with pytest.raises(ModelError, match="split is third, second"):
        cut(Skipping(), 3, ["third", "second"])


def test_a_parameter_in_two_stages():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    with pytest.raises(ModelError, match=r"0\.weight is used in stages 0 and 1"):
        cut(model, 2, None)


def test_a_forward_pass_that_asks_for_values():
    class Asking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) if x.mean() > 0 else self.b(x)

    with pytest.raises(ModelError, match=r"Asking\.forward cannot be traced") as caught:
        cut(Asking(), 2, None)
    assert "list of modules" in (caught.value.hint or "")


def test_a_forward_pass_that_asks_for_its_mode():
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(F.dropout(self.a(x), 0.5, self.training))

    model = Dropping()
    model.a.eval()
    with pytest.raises(ModelError, match="other things in training than in evaluation"):
        cut(model, 2, None)
    assert (model.training, model.a.training, model.b.training) == (True, False, True)


def test_a_forward_pass_with_any_number_of_arguments():
    class Open(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, *x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x[0]))

    with pytest.raises(ModelError, match="takes any number of arguments"):
        cut(Open(), 2, None)


def test_an_argument_that_the_cut_was_not_made_for():
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
def test_what_is_no_model(model, match):
    with pytest.raises(ModelError, match=match):
        as_module(model)
