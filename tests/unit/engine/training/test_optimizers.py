"""Optimizers and schedulers act once per global batch, and stay what they are."""

from __future__ import annotations

import copy
import random
import traceback
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.errors import ModelError, StepError
from lockstep.state.checkpoint import state_codec


def data(length: int = 16) -> TensorDataset:
    return TensorDataset(torch.randn(length, 3))


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_a_step_per_global_batch(make_run, replicas: int) -> None:
    with make_run(replicas=replicas) as run:
        model = run.model(nn.Linear(3, 1))
        plain = torch.optim.SGD(model.parameters(), lr=0.1)
        acted = []
        plain.register_step_post_hook(lambda *_: acted.append(run.step))
        optimizer = run.optimizer(plain)
        assert optimizer is plain
        for _ in run.epochs(2):
            for (x,) in run.loader(data(), batch_size=4):
                run.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
        assert len(acted) == run.step == 8


class Noisy(torch.optim.SGD):
    """Draws from all three generators."""

    @torch.no_grad()
    def step(self, closure=None):
        self.drawn = [torch.rand(()).item(), np.random.rand(), random.random()]
        return super().step(closure)


def hooked(parameters, lr: float) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr)

    def draw(own, *_) -> None:
        own.drawn = [torch.rand(()).item(), np.random.rand(), random.random()]

    optimizer.register_step_pre_hook(draw)
    return optimizer


@pytest.mark.parametrize("make", [Noisy, hooked])
def test_what_a_step_draws_is_of_the_step(make_run, make) -> None:
    """The same whatever the script draws, which draws on as if the step had drawn nothing."""

    def train(kind, *, draws: bool) -> tuple[list, list]:
        with make_run(replicas=2) as run:
            model = run.model(nn.Linear(3, 1))
            optimizer = run.optimizer(kind(model.parameters(), lr=0.1))
            around, inside = [], []
            for (x,) in run.loader(data(), batch_size=4):
                if draws:
                    torch.rand(1), np.random.rand(), random.random()
                run.backward(model(x).mean())
                optimizer.step()
                optimizer.zero_grad()
                around.append([torch.rand(()).item(), np.random.rand(), random.random()])
                inside.append(getattr(optimizer, "drawn", None))
            return around, inside[1::2]

    around, inside = train(make, draws=True)
    assert around == train(torch.optim.SGD, draws=True)[0]
    assert len({tuple(drawn) for drawn in inside}) == 4
    assert inside == train(make, draws=False)[1]


@pytest.mark.parametrize("scheduler_first", [True, False])
def test_a_scheduler_beside_it_without_warnings(make_run, scheduler_first: bool) -> None:
    with make_run(replicas=2, audit="off") as run:
        model = run.model(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if not scheduler_first:
            optimizer = run.optimizer(optimizer)
        scheduler = run.scheduler(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
        if scheduler_first:
            optimizer = run.optimizer(optimizer)
        rates = []
        for (x,) in run.loader(data(12), batch_size=4):
            run.backward(model(x).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
        assert rates == [1.0, 0.5, 0.5, 0.25, 0.25, 0.125]
        scheduler.step()  # once per epoch, outside of the loop: acts
        assert scheduler.get_last_lr() == [0.0625]


def test_a_scheduler_that_takes_a_metric(make_run) -> None:
    with make_run(replicas=2) as run:
        model = run.model(nn.Linear(3, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.1)
        scheduler = run.scheduler(plateau)
        scheduler.step(1.0)
        scheduler.step(2.0)
        assert optimizer.param_groups[0]["lr"] == 0.1


def test_what_is_no_scheduler(make_run) -> None:
    with make_run() as run, pytest.raises(StepError, match=r"object has no step\(\)"):
        run.scheduler(object())


class Odd:
    """Something that cannot be saved."""


def test_a_state_that_cannot_be_saved_is_refused_by_name(make_run) -> None:
    with make_run() as run:
        model = run.model(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        scheduler.owner = Odd()
        with pytest.raises(ModelError, match=r"the state StepLR\.owner is a Odd; expected"):
            run.scheduler(scheduler)
        optimizer.param_groups[0]["owner"] = Odd()
        with pytest.raises(ModelError, match=r"the state SGD\.param_groups\.0\.owner is a Odd"):
            run.optimizer(optimizer)


def test_a_state_that_holds_itself_is_refused(make_run) -> None:
    class Endless:
        load_state_dict = None

        def state_dict(self) -> dict[str, Any]:
            values: list[Any] = []
            values.append(values)
            return {"values": values}

    Endless.load_state_dict = Endless.state_dict
    with make_run() as run, pytest.raises(ModelError, match="endless has a container that holds"):
        run.register("endless", Endless())


class Alone(torch.optim.SGD):
    """Saves what it wants to."""

    def state_dict(self) -> dict[str, Any]:
        return {"moments": [1.0]}


def test_an_optimizer_without_the_usual_state_is_refused(make_run) -> None:
    with make_run() as run:
        model = run.model(nn.Linear(3, 1))
        no_groups = r"state_dict of optimizer 1 \(Alone\) has no state and no param_groups"
        with pytest.raises(ModelError, match=no_groups) as caught:
            run.optimizer(Alone(model.parameters(), lr=0.1))
        assert "super().state_dict()" in caught.value.hint


@pytest.mark.parametrize("added", [False, True])
def test_state_of_a_group_that_was_removed(make_run, added: bool) -> None:
    """Also where another group has come in its place before the next step."""
    refused = r"optimizer 1 \(SGD\) has state of 1 parameters that are in none of its groups"
    with pytest.raises(ModelError, match=refused) as caught, make_run() as run:  # noqa: PT012 - and at its end
        model = run.model(nn.Linear(3, 1))
        other = run.model(nn.Linear(1, 1))
        groups = [{"params": model.weight}, {"params": model.bias}]
        optimizer = run.optimizer(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
        for (x,) in run.loader(TensorDataset(torch.ones(2, 3)), batch_size=1):
            optimizer.zero_grad()
            run.backward(model(x).sum())
            optimizer.step()
        del optimizer.param_groups[1]
        if added:
            optimizer.add_param_group({"params": other.weight})
        optimizer.step()
    assert "optimizer.state.pop" in caught.value.hint


def test_a_group_that_was_removed_with_its_state(make_run) -> None:
    with make_run() as run:
        model = run.model(nn.Linear(3, 1))
        groups = [{"params": model.weight}, {"params": model.bias}]
        optimizer = run.optimizer(torch.optim.SGD(groups, lr=0.1, momentum=0.9))
        for (x,) in run.loader(TensorDataset(torch.ones(2, 3)), batch_size=1):
            optimizer.zero_grad()
            run.backward(model(x).sum())
            optimizer.step()
        del optimizer.param_groups[1]
        optimizer.state.pop(model.bias)
        before = [p.detach().clone() for p in (model.weight, model.bias)]
        optimizer.step()
    assert not torch.equal(model.weight, before[0])
    assert torch.equal(model.bias, before[1])


MAKE = {
    "run.model": lambda run, _: run.model(nn.Linear(3, 1)),
    "run.optimizer": lambda run, model: run.optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    ),
    "run.scheduler": lambda run, model: run.scheduler(
        torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 1)
    ),
}


@pytest.mark.parametrize("call", MAKE)
def test_what_is_made_again_in_a_later_epoch_or_batch_is_refused(make_run, call: str) -> None:
    make = MAKE[call]
    with make_run() as run:
        model = run.model(nn.Linear(3, 1))
        train = run.loader(TensorDataset(torch.ones(2, 3)), batch_size=1)
        again = rf"{call} was called again at .*test_optimizers\.py:\d+ in "
        for iterate in (lambda: run.epochs(3), lambda: train):
            made = []
            with pytest.raises(StepError, match=again) as caught:
                made.extend(make(run, model) for _ in iterate())
            assert len(made) == 1
            assert "before run.epochs" in caught.value.hint


def test_what_a_resumed_run_makes_again_may_be_made(make_run) -> None:
    """Several before a loop, in each phase, in one epoch, and when it is first needed."""
    with make_run() as run:
        models = [run.model(nn.Linear(3, 1)) for _ in range(3)]
        late = None
        for _phase in range(2):
            for make in MAKE.values():
                make(run, models[0])
            for epoch in run.epochs(3):
                if epoch >= 1 and late is None:
                    late = [make(run, models[1]) for make in MAKE.values() for _ in range(2)]
                if epoch == 2:
                    MAKE["run.optimizer"](run, models[2])
        for _own in range(2):
            MAKE["run.optimizer"](run, models[2])
        assert late is not None


def test_a_closure_is_refused(make_run) -> None:
    with make_run() as run:
        model = run.model(nn.Linear(3, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(StepError, match=r"SGD\.step was given a closure"):
            optimizer.step(lambda: 0.0)


def test_strangers_are_refused(make_run) -> None:
    with make_run() as run:
        model, stranger = run.model(nn.Linear(3, 1)), nn.Linear(3, 1)
        parameters = [*model.parameters(), *stranger.parameters()]
        with pytest.raises(
            ModelError, match=r"optimizer 1 \(SGD\) holds 2 of 4 parameters"
        ) as caught:
            run.optimizer(torch.optim.SGD(parameters, lr=0.1))
        assert "run.model" in caught.value.hint
        with pytest.raises(ModelError, match=r"optimizer 2 \(Adam\)"):
            run.optimizer(torch.optim.Adam(stranger.parameters()))


def test_a_gradient_of_an_earlier_batch_stops_the_step(make_run) -> None:
    early = pytest.raises(StepError, match="gradients of an earlier batch")
    with early, make_run(replicas=2) as run:
        model = run.model(nn.Linear(3, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for (x,) in run.loader(data(), batch_size=4):
            run.backward(model(x).mean())
            optimizer.step()


@pytest.mark.parametrize("replicas", [1, 2])
def test_clearing_before_backward_is_as_good(make_run, replicas: int) -> None:
    def digest(before: bool) -> str:
        with make_run(replicas=replicas) as run:
            model = run.model(nn.Linear(3, 1))
            optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for (x,) in run.loader(data(), batch_size=4):
                if before:
                    optimizer.zero_grad()
                run.backward(model(x).square().mean())
                optimizer.step()
                if not before:
                    optimizer.zero_grad()
            return run.digest()

    assert digest(before=True) == digest(before=False)


def test_clearing_to_zeros_instead_of_none(make_run) -> None:
    with make_run(replicas=2) as run:
        model = run.model(nn.Linear(3, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for (x,) in run.loader(data(), batch_size=4):
            run.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        assert run.step == 4


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_after_the_batchs_microbatches(make_run, replicas: int) -> None:
    """What the hint of `run.batches` leads to: one update per batch, outside of its loop."""

    def train(outside: bool) -> tuple[str, int]:
        with make_run(replicas=replicas) as run:
            model = run.model(nn.Linear(3, 1))
            optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
            for batch in run.batches(run.loader(data(), batch_size=4)):
                for (x,) in batch:
                    run.backward(model(x).square().mean())
                    if not outside:
                        optimizer.step()
                        optimizer.zero_grad()
                if outside:
                    optimizer.step()
                    optimizer.zero_grad()
            return run.digest(), run.step

    assert train(outside=True) == train(outside=False)


def test_values_are_clipped_in_the_body(make_run) -> None:
    with make_run(replicas=2) as run:
        model = run.model(nn.Linear(3, 1, bias=False))
        run.clip_grad_value_(model, 0.5)  # nothing there yet
        for (x,) in run.loader(data(4), batch_size=4):
            run.backward(1000 * model(x).sum())
            run.clip_grad_value_(model, 0.5)
        assert model.weight.grad.abs().max() == 0.5
        run.clip_grad_value_(model.weight, 0.25)
        run.clip_grad_value_(list(model.parameters()), 0.3)
        assert model.weight.grad.abs().max() == 0.25


def clip_by_torch(run) -> None:
    with run:
        model = run.model(nn.Linear(3, 1))
        for (x,) in run.loader(data(4), batch_size=4):
            run.backward(model(x).mean())
            nn.utils.clip_grad_value_(model.parameters(), 0.5)


def test_torchs_own_clipping_of_values_is_explained(make_run) -> None:
    """It fails where there is no gradient, as before the last microbatch."""
    clip_by_torch(make_run(replicas=1))
    with pytest.raises(StepError, match="clip_grad_value_ found no gradients") as caught:
        clip_by_torch(make_run(replicas=2))
    assert "run.clip_grad_value_" in caught.value.hint
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "clip_grad_value_" in frames


def test_a_tensor_as_learning_rate_that_changes_within_a_batch(make_run) -> None:
    """A scheduler that the run does not know fills it in place."""
    changed = pytest.raises(StepError, match=r"lr of group 0 of Adam changed .*, from 0\.1")
    with changed, make_run(replicas=2) as run:
        model = run.model(nn.Linear(3, 1))
        rate = torch.tensor(0.1)
        optimizer = run.optimizer(torch.optim.Adam(model.parameters(), lr=rate))
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for (x,) in run.loader(data(), batch_size=4):
            run.backward(model(x).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("weight_decay", [0.1, 0.2]),
        ("weight_decay", [0.1, np.float32(0.2)]),
        ("betas", [(0.9, 0.99), (0.9, 0.98)]),
        ("betas", [[0.9, torch.tensor(0.99)], [0.9, torch.tensor(0.98)]]),
        ("betas", [(0.9, 0.99), 0.9]),
        ("lr", [0.1, torch.tensor(0.2)]),
        ("lr", [torch.tensor([0.1, 0.2]), torch.tensor([0.1, 0.3])]),
        ("capturable", [None, "never"]),
    ],
)
def test_settings_of_groups_that_change_within_a_batch(make_run, name, values) -> None:
    """As a counter of microbatches sets them; the same ones in other objects are no change."""

    def train(second: int) -> int:
        with make_run(replicas=3, audit="off") as run:
            model = run.model(nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1)))
            adam = torch.optim.Adam([{"params": part.parameters()} for part in model])
            adam.step = lambda: None  # which values it would take is not what is tested
            optimizer = run.optimizer(adam)
            # The second epoch ends in a batch with fewer samples than there are replicas.
            for _ in run.epochs(2):
                for number, (x,) in enumerate(run.loader(data(11), batch_size=3)):
                    value = copy.deepcopy(values[second if number % 3 else 0])
                    optimizer.param_groups[1][name] = value
                    run.backward(model(x).mean())
                    optimizer.step()
                    optimizer.zero_grad()
            return run.step

    assert train(0) == 8
    with pytest.raises(StepError, match=f"{name} of group 1 of Adam changed") as caught:
        train(1)
    assert "run.batch_index" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("replicas", "when"),
    [
        (2, lambda i: i % 2 == 1),
        (4, lambda i: i % 2 == 1),
        (2, lambda i: i % 2 == 0),
        (4, lambda i: i % 3 == 2),
    ],
)
def test_steps_in_some_microbatches_only(make_run, replicas: int, when) -> None:
    seen = pytest.raises(StepError, match=r"SGD\.step was called in some microbatches only")
    with seen as caught, make_run(replicas=replicas) as run:
        model = run.model(nn.Linear(3, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for number, (x,) in enumerate(run.loader(data(32), batch_size=4)):
            run.backward(model(x).mean())
            if when(number):
                optimizer.step()
            optimizer.zero_grad()
    assert "replicas above the number of ranks" in caught.value.hint


def test_the_idiom_of_accumulation_with_one_replica(make_run) -> None:
    with make_run(replicas=1) as run:
        model = run.model(nn.Linear(3, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for number, (x,) in enumerate(run.loader(data(16), batch_size=4)):
            run.backward(model(x).mean() / 2)
            if (number + 1) % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()
        assert run.step == 2


def test_steps_in_some_batches_only(make_run) -> None:
    """By the batch, which is the same on every layout."""
    with make_run(replicas=2) as run:
        model = run.model(nn.Linear(3, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for number, batch in enumerate(run.batches(run.loader(data(16), batch_size=4))):
            for (x,) in batch:
                run.backward(model(x).mean())
                if number % 2:
                    optimizer.step()
                optimizer.zero_grad()
        assert run.step == 2


@pytest.mark.parametrize("unscales", [False, True])
def test_a_scaler_of_the_script_is_refused_with_what_to_use(make_run, unscales: bool) -> None:
    refused = pytest.raises(StepError, match=r"GradScaler\.step was called")
    with refused as caught, make_run(replicas=2) as run:
        model = run.model(nn.Linear(3, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        scaler = torch.amp.GradScaler("cpu")
        for (x,) in run.loader(data(), batch_size=4):
            run.backward(scaler.scale(model(x).mean()))
            if unscales:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
    assert 'precision="fp16"' in caught.value.hint


def test_a_scaler_that_is_disabled(make_run) -> None:
    with make_run(replicas=2) as run:
        model = run.model(nn.Linear(3, 1))
        optimizer = run.optimizer(torch.optim.Adam(model.parameters(), fused=True))
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        for (x,) in run.loader(data(), batch_size=4):
            run.backward(scaler.scale(model(x).mean()))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert run.step == 4


@pytest.mark.parametrize("grouped", [False, True])
def test_no_sync_is_there_and_changes_nothing(make_run, request, grouped: bool) -> None:
    if grouped:
        request.getfixturevalue("lone_group")
    with make_run(replicas=2) as run:
        model = run.model(nn.Linear(3, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for (x,) in run.loader(data(), batch_size=4):
            with model.no_sync():
                run.backward(model(x).mean())
            optimizer.step()
            optimizer.zero_grad()
        assert run.step == 4
        assert "no_sync" not in model.state_dict()


class Syncing(nn.Linear):
    def no_sync(self) -> str:
        return "its own"


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_whole_model_is_saved_and_keeps_its_own_no_sync(
    make_run, request, tmp_path, replicas: int, grouped: bool
) -> None:
    if grouped:
        request.getfixturevalue("lone_group")
    with make_run(replicas=replicas) as run:
        model = run.model(Syncing(3, 1))
        for (x,) in run.loader(data(), batch_size=4):
            run.backward(model(x).mean())
        assert model.no_sync() == "its own"
        torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    x = torch.ones(2, 3)
    assert torch.equal(loaded(x), model(x))


def test_parameters_of_another_model_join_later(make_run) -> None:
    stranger = pytest.raises(ModelError, match="2 of 6 parameters that belong to no model")
    with stranger, make_run(replicas=2) as run:
        first, second = run.model(nn.Linear(3, 2)), run.model(nn.Linear(2, 1))
        optimizer = run.optimizer(torch.optim.SGD(second.parameters(), lr=0.1))
        before = first.weight.clone()
        for epoch in run.epochs(2):
            if epoch == 1:
                assert torch.equal(first.weight, before)
                optimizer.add_param_group({"params": first.parameters()})
            for (x,) in run.loader(data(), batch_size=4):
                run.backward(second(first(x)).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        assert not torch.equal(first.weight, before)
        optimizer.add_param_group({"params": nn.Linear(1, 1).parameters()})
        optimizer.step()


def test_clip_acts_with_the_step(make_run) -> None:
    with make_run(replicas=2) as run:
        model = run.model(nn.Linear(3, 1, bias=False))
        norms = []
        for (x,) in run.loader(data(4), batch_size=4):
            run.backward(1000 * model(x).sum())
            norms.append(run.clip_grad_norm_(model, 1.0))
        assert norms[0].isnan()
        assert norms[1].item() > 1.0
        assert model.weight.grad.norm().item() == pytest.approx(1.0, rel=1e-4)
        again = run.clip_grad_norm_(model.parameters(), 0.5)
        assert again.item() == pytest.approx(1.0, rel=1e-4)
        assert run.clip_grad_norm_(model.weight, 10.0).item() == pytest.approx(0.5, rel=1e-4)
        assert run.clip_grad_norm_([model.weight], 10.0, norm_type=float("inf")).item() <= 0.5


class Narrow:
    """A scheduler of the user's own, without room for further attributes."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def step(self) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def test_a_scheduler_keeps_its_kind_and_its_state(make_run) -> None:
    with make_run() as run:
        model = run.model(nn.Linear(3, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        own, narrow = torch.optim.lr_scheduler.StepLR(optimizer, 3), Narrow()
        before = own.state_dict()
        assert run.scheduler(own) is own
        assert own.state_dict() == before
        assert isinstance(own, torch.optim.lr_scheduler.StepLR)
        run.scheduler(narrow)
        narrow.step()
        assert narrow.state_dict() == {"count": 1}


def test_a_scheduler_that_cannot_be_saved_is_refused(make_run) -> None:
    class Forgetful:
        def step(self) -> None: ...

    with make_run() as run, pytest.raises(StepError, match=r"Forgetful has no state_dict\(\)"):
        run.scheduler(Forgetful())


def test_state_keeps_its_type_beside_parameters_of_another(make_run) -> None:
    """NAdam counts in float32, also for parameters in float64: what load_state_dict casts."""
    with make_run() as run:
        model = run.model(nn.Linear(3, 1, dtype=torch.float64))
        optimizer = run.optimizer(torch.optim.NAdam(model.parameters(), lr=0.1))
        model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        for group in optimizer.param_groups:
            assert group["lr"] == 0.1
        type(optimizer).step(optimizer)
        state = run._session.state
        text, tensors = state_codec.flatten(state.capture())
        state.load(state_codec.rebuild(text, lambda name: tensors[name].clone()), whole=True)
        kinds = {name: value.dtype for name, value in optimizer.state[model.weight].items()}
        assert kinds["mu_product"] == torch.float32
        assert kinds["exp_avg"] == torch.float64
