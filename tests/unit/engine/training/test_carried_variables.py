"""Variables that a crash would lose are named once; after a resume, those that it has lost."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.engine.recovery.checkpointing import StateSaver
from lockstep.engine.recovery.resume import SavedState, StateSearch
from lockstep.engine.training import carried_variables
from lockstep.engine.training.carried_variables import SAVED, packed, unpacked
from lockstep.state.checkpoint.parts import StoredTensor

Make = Callable[..., Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layer(x)
        return result


class Counting(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


class Average:
    """A registered object that saves two of its three attributes, one under another name."""

    def __init__(self) -> None:
        self.value, self.weight, self.updates, self._momentum = 0.0, 0.1, 0, 1.0

    def update(self, loss: float) -> None:
        self.updates += 1
        self._momentum *= 0.9
        self.value += self.weight * (loss - self.value)

    def state_dict(self) -> dict[str, float]:
        return {"mean": self.value, "momentum": self._momentum}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value, self._momentum = state["mean"], state["momentum"]


class Start:
    """A model, its optimizer and loader, and a step."""

    def __init__(self, run: Any, model: nn.Module | None = None) -> None:
        self.run, self.model = run, run.model(model or nn.Linear(4, 3))
        self.optimizer = run.optimizer(torch.optim.SGD(self.model.parameters(), lr=0.1))
        data = TensorDataset(torch.randn(24, 4), torch.arange(24) % 3)
        self.train = run.loader(data, batch_size=8, shuffle=True)

    def step(self, x: torch.Tensor, y: torch.Tensor, weight: float = 1.0) -> torch.Tensor:
        loss = weight * F.cross_entropy(self.model(x), y)
        self.run.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def lines(captured: Any) -> list[str]:
    return [line for line in captured.err.splitlines() if "warning" in line]


def names(text: str) -> list[str]:
    return re.findall(r"`([\w.]+)`", text)


def test_a_hint_with_an_infinite_value_is_python(make_run: Make, capsys: Any) -> None:
    with make_run() as run:
        start = Start(run)
        best = float("inf")
        for x, y in start.train:
            best = min(best, 1.0 / (1 + run.step))
            start.step(x, y, 1.0 if best > 0 else 0.0)
    (told,) = lines(capsys.readouterr())
    assert told.endswith('hint: state = run.state(best=float("inf"))')


def test_what_each_step_changes_is_named_at_the_second_point(make_run: Make, capsys: Any) -> None:
    with make_run() as run:
        start = Start(run)
        scale, mean, last = 1.0, 0.0, None
        for x, y in start.train:
            last = start.step(x, y, scale)
            scale *= 0.5
            mean = 0.9 * mean + 0.1 * float(last)
            if run.step == 1:
                assert lines(capsys.readouterr()) == []
            if run.step == 3:
                (told,) = lines(capsys.readouterr())
        print(last, mean)  # noqa: T201 - reads the last loss
    assert names(told) == ["scale"]  # the mean is only printed
    assert re.search(r"`scale` \(test_carried_variables\.py:\d+\) changes", told)
    assert told.endswith(
        "changes in the loop and is not kept over a crash; hint: state = run.state(scale=1.0)"
    )
    assert lines(capsys.readouterr()) == []


@pytest.mark.parametrize("place", ["begin", "end", "second"])
@pytest.mark.parametrize("own_epochs", [False, True])
def test_what_an_epoch_changes_is_named(
    make_run: Make, capsys: Any, place: str, own_epochs: bool
) -> None:
    with make_run() as run:
        start, ratio, seen = Start(run), 1.0, []
        for epoch in range(4) if own_epochs else run.epochs(4):
            if place == "begin":
                ratio *= 0.8
            for x, y in start.train:
                start.step(x, y, ratio + len(seen))
            if place == "end" or (place == "second" and epoch > 0):
                ratio *= 0.8
                seen.append(run.step)
    told = lines(capsys.readouterr())
    assert names(" ".join(told)) == (["ratio"] if place == "begin" else ["ratio", "seen"])


def test_what_is_made_anew_is_not_named(make_run: Make, capsys: Any) -> None:
    def one_epoch(start: Start, epoch: int, rate: float) -> torch.Tensor:
        scaled = rate * 0.5
        for x, y in start.train:
            loss = start.step(x, y, scaled + epoch)
        return loss

    with make_run() as run:
        start, began, tick = Start(run), time.time(), time.perf_counter()
        for epoch in run.epochs(4):
            begun = time.time()
            loss = one_epoch(start, epoch, 0.8**epoch)
            run.log(loss=loss, seconds=time.time() - begun)
        print(loss, began, tick, epoch)  # noqa: T201
    assert lines(capsys.readouterr()) == []


class Sampled:
    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_what_an_epoch_makes_before_its_loop_is_not_named(make_run: Make, capsys: Any) -> None:
    """A run that resumes goes through that code again."""
    with make_run() as run:
        start, sampled = Start(run), Sampled()
        for epoch in run.epochs(4):
            sampled.set_epoch(epoch)
            rows, rate = torch.randn(3).softmax(0), 0.9**epoch
            for x, y in start.train:
                start.step(x, y, float(rows[0]) * rate + sampled.epoch)
    assert lines(capsys.readouterr()) == []


def test_what_the_run_keeps_is_not_named(make_run: Make, capsys: Any) -> None:
    with make_run() as run:
        start = Start(run, Net())
        average = run.register("average", Average())
        state, params = run.state(total=0.0, history=[]), list(start.model.parameters())
        history = state.history
        for _ in run.epochs(3):
            for x, y in start.train:
                state.total += float(start.step(x, y))
                history.append(len(params))
        assert average.updates == 0
    assert lines(capsys.readouterr()) == []


def test_attributes_that_no_state_dict_returns(make_run: Make, capsys: Any) -> None:
    with make_run() as run:
        start = Start(run, Counting())
        average = run.register("average", Average())
        for x, y in start.train:
            average.update(float(start.step(x, y)))
    (told,) = lines(capsys.readouterr())
    assert names(told) == ["Counting.calls"]
    assert "let state_dict() return it" in told


def test_an_average_of_weights_that_the_run_does_not_know(make_run: Make, capsys: Any) -> None:
    with make_run() as run:
        start = Start(run)
        ema = nn.Linear(4, 3)
        for x, y in start.train:
            start.step(x, y)
            with torch.no_grad():
                ema.weight.lerp_(start.model.weight, 0.1)
    (told,) = lines(capsys.readouterr())
    assert names(told) == ["ema"]
    assert told.endswith('hint: run.register("ema", ema)')


def test_the_index_of_enumerate(make_run: Make, capsys: Any) -> None:
    with make_run() as run:
        start = Start(run)
        for i, (x, y) in enumerate(start.train):
            start.step(x, y, 1.0 + i)
    (told,) = lines(capsys.readouterr())
    assert names(told) == ["i"]
    assert told.endswith("hint: run.step counts updates")


def annealed(run: Any) -> None:
    start, ratio, rows, same = Start(run), 1.0, [], 5
    for epoch in run.epochs(4):
        for x, y in start.train:
            start.step(x, y, ratio + same + len(rows))
        ratio *= 0.8
        rows.append(epoch)


def test_a_resume_names_what_was_lost_with_both_values(
    make_run: Make, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    points: list[SavedState] = []

    def keep(keeper: StateSaver) -> None:
        text, tensors = keeper._capture()
        stored = {name: StoredTensor.of(tensor.clone()) for name, tensor in tensors.items()}
        points.append(SavedState(text, stored, "test"))

    monkeypatch.setattr(StateSaver, "at_point", keep)
    with make_run() as run:
        annealed(run)
    capsys.readouterr()
    monkeypatch.setattr("lockstep.engine.recovery.resume.ResumeInfo.is_new", False)
    # The first batch of the third epoch; without fingerprints it is that of an earlier version.
    (saved,) = (one for one in points if one.position.steps == 7)
    monkeypatch.setattr(StateSearch, "find", lambda _: saved)
    with make_run() as run:
        annealed(run)
    told = lines(capsys.readouterr())[0]
    assert re.search(
        r"`ratio` \(test_carried_variables\.py:\d+\) was 0\.64\d*, and is 1\.0 now", told
    )
    assert re.search(r"`rows` \(.*\) was \[0, 1\], and is \[\] now.*; the result may differ", told)
    assert "hint: state = run.state(rows=[], ratio=1.0)" in told
    assert not {"same", "epoch"} & set(names(told))
    content = {name: one for name, one in json.loads(saved.text).items() if name != "variables"}
    monkeypatch.setattr(StateSearch, "find", lambda _: replace(saved, text=json.dumps(content)))
    with make_run() as run:
        annealed(run)
    assert "when the state was saved" not in capsys.readouterr().err


def test_a_state_of_an_earlier_version_has_none() -> None:
    assert SavedState('{"position": {}, "state": {}}', {}, "disk").variables == ""
    assert unpacked("") == unpacked("no base64") == unpacked("bm8ganNvbg==") == {}


@pytest.mark.parametrize("count", [0, 1, 40, 5000])
def test_what_is_saved_has_one_length(count: int) -> None:
    """Parts of a snapshot lie behind it, and each rank computes where."""
    texts = {f"train.py:<module>:größe{n}": '"\\' * 15 for n in range(count)}
    told = packed(texts)
    assert len(told) == SAVED
    assert told.isascii()
    assert unpacked(told).items() <= texts.items()
    assert len(unpacked(told)) >= min(count, 9)


def test_a_fault_of_ours_does_not_end_the_run(
    make_run: Make, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RecursionError("too deep")

    monkeypatch.setattr(carried_variables.variables, "observe", fails)
    with make_run() as run:
        start = Start(run)
        for x, y in start.train:
            start.step(x, y)
    (told,) = lines(capsys.readouterr())
    assert "the script's variables cannot be looked at (RecursionError('too deep'))" in told
