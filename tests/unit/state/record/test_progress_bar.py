"""What a person sees where standard error is not a terminal: lines, never a bar, never a traceback."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.engine.training import context
from lockstep.state.record.progress_bar import ProgressBar


def train(run: Any, body=lambda *_: None, epochs: int = 2) -> None:
    with run:
        model = run.model(nn.Linear(2, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = run.loader(TensorDataset(torch.randn(8, 2)), batch_size=4)
        for epoch in run.epochs(epochs):
            for (x,) in loader:
                loss = model(x).square().mean()
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
                body(run, epoch)


def test_a_line_per_epoch(make_run, capsys) -> None:
    train(make_run("digits", progress=True))
    out, err = capsys.readouterr()
    first, *lines = err.splitlines()
    assert re.match(r"lockstep: digits: exact, 1 replicas? on 1 ranks?, cpu, threads 1, ", first)
    assert len(lines) == 2
    for number, line in enumerate(lines, 1):
        assert re.fullmatch(rf"epoch {number}/2  loss [\d.e-]+  [\d,]+ samples/s", line)
    assert "\r" not in err
    assert out.startswith("lockstep: finished steps=4 ")


def test_the_epochs_of_each_phase_are_counted_by_themselves(make_run, capsys) -> None:
    with make_run(progress=True) as run:
        model = run.model(nn.Linear(2, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        loader = run.loader(TensorDataset(torch.ones(4, 2)), batch_size=4)

        def train_once() -> None:
            for (x,) in loader:
                run.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()

        for _ in run.epochs(2):
            train_once()
        train_once()
        for _ in run.epochs(3):
            train_once()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("epoch ")]
    titles = [line.partition("  ")[0] for line in lines]
    expected = ["epoch 1/2", "epoch 2/2", "epoch 3", "epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert titles == expected, "a loop outside of phases has the loader's own count"


def test_without_progress_the_final_line_stays(make_run, capsys) -> None:
    train(make_run(progress=False))
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("lockstep: finished steps=4 ")


def test_warnings_come_without_progress(make_run, capsys) -> None:
    with make_run(progress=False) as run:
        model = run.model(nn.Linear(2, 1))
        for (x,) in run.loader(TensorDataset(torch.ones(4, 2)), batch_size=4):
            run.backward(model(x).sum())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lockstep: warning: gradients were computed, but no optimizer")


def test_a_step_that_is_left_out_is_said_without_progress(make_run, capsys) -> None:
    with make_run(progress=False, precision="fp16") as run:
        model = run.model(nn.Linear(2, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for (x,) in run.loader(TensorDataset(torch.ones(4, 2)), batch_size=4):
            run.backward(model(x).sum() * torch.inf)
            optimizer.step()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("lockstep: fp16 overflow: skipped step 1")


def test_a_checkpoint_that_is_skipped_is_said_without_progress(make_run, capsys, tmp_path) -> None:
    with pytest.raises(ZeroDivisionError), make_run(run_dir=tmp_path / "one", progress=False):
        raise ZeroDivisionError
    damaged = tmp_path / "one" / "checkpoints" / "step-00000003"
    damaged.mkdir(parents=True)
    (damaged / "manifest.json").write_text("{")
    context.taken_directories.clear()
    with make_run(run_dir=tmp_path / "one", progress=False):
        said = capsys.readouterr().err
    assert f"lockstep: warning: the checkpoint {damaged} is skipped: " in said


@pytest.mark.parametrize(
    "value", [torch.arange(3.0), torch.zeros(0), "text", None, True, [1, 2], torch.tensor([[1]])]
)
def test_anything_that_is_logged_can_be_shown(make_run, capsys, value: Any) -> None:
    train(make_run(progress=True), lambda run, _: run.log(other=value), epochs=1)
    assert re.search(r"^epoch 1/1  loss .*other", capsys.readouterr().err, re.MULTILINE)


def test_an_evaluation_in_the_middle_keeps_the_epochs_line(make_run, capsys) -> None:
    evaluation = []

    def evaluate(run: Any, _: int) -> None:
        if not evaluation:
            evaluation.append(run.loader(TensorDataset(torch.zeros(8, 2)), batch_size=4))
        with torch.no_grad():
            run.mean(x.sum() for (x,) in evaluation[0])

    train(make_run(progress=True), evaluate, epochs=1)
    assert len(re.findall(r"^epoch 1/1 ", capsys.readouterr().err, re.MULTILINE)) == 1


def test_a_loop_outside_of_epochs_is_one_of_nobody_knows_how_many(make_run, capsys) -> None:
    with make_run(progress=True) as run:
        model = run.model(nn.Linear(2, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for (x,) in run.loader(TensorDataset(torch.ones(4, 2)), batch_size=4):
            run.backward(model(x).sum())
            optimizer.step()
    line = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(r"epoch 1  [\d,]+ samples/s", line)


def test_evaluation_shows_no_line(make_run, capsys) -> None:
    with make_run(progress=True) as run, torch.no_grad():
        for _ in run.loader(TensorDataset(torch.zeros(8)), batch_size=4):
            pass
    assert "epoch" not in capsys.readouterr().err


def test_a_bar_on_a_terminal(monkeypatch, capsys) -> None:
    import sys

    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: True, raising=False)
    progress = ProgressBar(shown=True)
    progress.epoch_begins(0, 3, 2)
    progress.log({"loss": torch.tensor(0.25)})
    for _ in range(2):
        progress.step(4)
    progress.epoch_ends(0, 3)
    err = capsys.readouterr().err
    assert "epoch 1/3" in err
    assert "loss 0.25" in err
    assert "\r" in err
    assert re.search(r"epoch 1/3  loss 0.25  [\d,]+ samples/s$", err.rstrip())


def test_other_ranks_show_nothing(capsys) -> None:
    progress = ProgressBar(shown=False)
    progress.epoch_begins(0, 1, 1)
    progress.log({"loss": 1.0})
    progress.step(4)
    progress.epoch_ends(0, 1)
    assert capsys.readouterr() == ("", "")
