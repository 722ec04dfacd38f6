"""The loss scale of fp16 (A17)."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.engine.strategies import precision
from lockstep.engine.strategies.precision import check_precision
from lockstep.engine.strategies.single import SingleModel
from lockstep.engine.training import loss_scale
from lockstep.engine.training.loss_scale import Scaler
from lockstep.errors import DeviceError, NonFiniteLossError
from tests.unit.contexts import model_context


class Made:
    """A model with gradients to order, and a scaler that remembers what it has said."""

    def __init__(self, replicas: int = 2) -> None:
        self.said: list[str] = []
        self.logged: list[dict[str, Any]] = []
        self.module = nn.Linear(2, 1)
        self.model = SingleModel(self.module, model_context(replicas))
        self.scaler = Scaler(None, torch.device("cpu"), self.said.append, self.logged.append)

    def step(self, value: float) -> bool:
        """Let gradients of `value`, scaled, meet; say whether the step is left out."""
        for parameter in self.model.parameters:
            parameter.grad = torch.full_like(parameter, value) * self.scaler.scale
        self.scaler.after_backward([self.model])
        skips = self.scaler.skips([self.model])
        self.scaler.step_ends(1, None)  # type: ignore[arg-type]
        return skips


def test_gradients_come_back_with_all_their_bits() -> None:
    made = Made()
    assert not made.step(0.1)
    assert torch.equal(made.module.weight.grad, torch.full((1, 2), 0.1))
    assert made.scaler.scale == 65536.0


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_a_step_is_left_out_and_the_scale_halved(bad: float) -> None:
    made = Made()
    assert made.step(bad)
    assert made.scaler.scale == 32768.0
    assert made.logged == [{"scale": 32768.0}]
    assert made.said[0].startswith("lockstep: fp16 overflow: skipped step 1")
    assert not made.step(1.0)


def test_the_scale_doubles_after_enough_good_steps_in_a_row(monkeypatch) -> None:
    monkeypatch.setattr(loss_scale, "INTERVAL", 3)
    made = Made()
    steps = [1.0, 1.0, float("inf"), 1.0, 1.0, 1.0, 1.0]
    scales = []
    for value in steps:
        made.step(value)
        scales.append(made.scaler.scale / 65536)
    assert scales == [1, 1, 0.5, 0.5, 0.5, 1, 1]


def test_the_numbers_are_gradscalers(monkeypatch) -> None:
    """Both see the same gradients; after each step both have the same scale."""
    monkeypatch.setattr(loss_scale, "INTERVAL", 4)
    theirs = torch.amp.GradScaler("cpu", growth_interval=4)
    made, twin = Made(), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.0)
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        bad = torch.rand((), generator=generator).item() < 0.15
        value = float("nan") if bad else 0.3
        theirs.scale(torch.ones(()))
        for parameter in twin.parameters():
            parameter.grad = torch.full_like(parameter, value) * theirs.get_scale()
        theirs.step(optimizer)
        theirs.update()
        made.step(value)
        assert made.scaler.scale == theirs.get_scale()
    assert made.scaler.scale != 65536.0


def test_an_end_where_no_scale_helps() -> None:
    made = Made()
    while made.scaler.scale > loss_scale.LEAST:
        assert made.step(float("nan"))
    with pytest.raises(
        NonFiniteLossError, match="not finite in fp16 even with a loss scale"
    ) as seen:
        made.step(float("nan"))
    assert made.scaler.scale == loss_scale.LEAST
    assert "bf16" in seen.value.hint


def test_the_state_comes_back() -> None:
    made, other = Made(), Made()
    made.step(float("inf"))
    made.step(1.0)
    other.scaler.load_state_dict(copy.deepcopy(made.scaler.state_dict()))
    assert other.scaler.state_dict() == {"scale": 32768.0, "good": 1}


def accumulate(make_run: Any, precision: str) -> tuple[str, float]:
    """One replica: gradients of two batches wait for one step, as plain PyTorch has it."""
    with make_run(precision=precision, replicas=1, seed=1) as run:
        model = run.model(nn.Linear(3, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        data = run.loader(TensorDataset(torch.randn(12, 3)), batch_size=3)
        for number, (x,) in enumerate(data):
            run.backward(model(x).square().mean() * 0.01)
            if number % 2:
                gradient = float(model.weight.grad.abs().max())
                optimizer.step()
                optimizer.zero_grad()
        return run.scale, gradient


def test_gradients_that_wait_are_scaled_along(make_run) -> None:
    scale, gradient = accumulate(make_run, "fp16")
    one, expected = accumulate(make_run, "fp32")
    assert (scale, one) == (65536.0, 1.0)
    assert gradient == pytest.approx(expected, rel=0.01)


def test_the_record_tells_the_scale(make_run) -> None:
    with make_run(precision="fp16", replicas=1) as run:
        model = run.model(nn.Linear(3, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for (x,) in run.loader(TensorDataset(torch.full((2, 3), 1e4)), batch_size=1):
            run.backward(model(x).square().mean() * 1e30)
            optimizer.step()
            optimizer.zero_grad()
    events = (run.directory / "events/rank-0.jsonl").read_text()
    assert '"scale": 32768.0' in events or '"scale":32768.0' in events


def test_a_device_that_cannot(monkeypatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'\nmore")

    check_precision("fp32", torch.device("cpu"))
    check_precision("fp16", torch.device("cpu"))
    with pytest.raises(DeviceError, match=r"precision=bf16 on meta.* it has no autocast"):
        check_precision("bf16", torch.device("meta"))
    monkeypatch.setattr(precision.torch, "autocast", refuse)
    with pytest.raises(DeviceError, match="not implemented for 'Half'\nhint") as seen:
        check_precision("fp16", torch.device("cpu"))
    assert seen.value.hint == "precision=bf16 or fp32"
    assert seen.value.exit_code == 2


def test_a_device_where_torch_turns_autocast_off_with_a_warning(monkeypatch) -> None:
    monkeypatch.setitem(precision.REDUCED, "fp8", torch.float8_e4m3fn)
    with pytest.raises(DeviceError, match=r"precision=fp8 on cpu: .*not supported"):
        check_precision("fp8", torch.device("cpu"))


def test_ranks_agree_on_what_was_found_before_the_backward_pass_is_left(
    make_run, monkeypatch
) -> None:
    """Until then a rank that waits for another one is seen to wait."""
    with make_run(precision="fp16") as run:
        model = run.model(nn.Linear(2, 1))
        backward, scaler = run._session.backward, run._session.state.scaler
        seen: list[str] = []
        watchdog: Any = SimpleNamespace(
            backward_begins=lambda *_: None, backward_ends=lambda: seen.append("leaves")
        )
        monkeypatch.setattr(backward, "_context", replace(backward._context, watchdog=watchdog))
        monkeypatch.setattr(scaler, "after_backward", lambda _models: seen.append("agrees"))
        for (x,) in run.loader(TensorDataset(torch.ones(2, 2)), batch_size=2):
            run.backward(model(x).sum())
            break
        assert seen == ["agrees", "leaves"]
        model.zero_grad()
