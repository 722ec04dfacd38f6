"""Signals that ask a run to end, in one process."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import lockstep
from lockstep.engine.recovery.preemption import VARIABLE, Preempted, Signals, chosen_signals
from lockstep.engine.training import context
from lockstep.errors import PREEMPTED, UsageError


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}
    for number in before:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_may_be_chosen():
    assert chosen_signals({}) == [signal.SIGTERM]
    assert chosen_signals({VARIABLE: "usr1"}) == [signal.SIGTERM, signal.SIGUSR1]
    assert chosen_signals({VARIABLE: "SIGTERM"}) == [signal.SIGTERM]
    with pytest.raises(UsageError, match="expected the name of a signal"):
        chosen_signals({VARIABLE: "STOPP"})


def test_the_first_signal_asks_and_a_patient_process_ends_at_none(monkeypatch):
    monkeypatch.setenv(VARIABLE, "USR1")
    asked = []
    signals = Signals(lambda: asked.append(1), patient=True)
    signals.listen()
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM):
        os.kill(os.getpid(), number)
    signals.close()
    assert asked == [1]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_handlers_of_the_script_stay():
    own = lambda *_: None  # noqa: E731
    signal.signal(signal.SIGTERM, own)
    signals = Signals(lambda: None, patient=False)
    signals.listen()
    assert signal.getsignal(signal.SIGTERM) is own
    signals.close()
    assert signal.getsignal(signal.SIGTERM) is own


def train(directory, stop_at: int = 0) -> str:
    with lockstep.Run("run", run_dir=directory, progress=False) as run:
        model = run.model(nn.Linear(1, 1))
        optimizer = run.optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in run.epochs(2):
            for x in run.loader([torch.ones(1)] * 5, batch_size=1):
                run.backward(model(x).sum())
                optimizer.step()
                optimizer.zero_grad()
                if run.step == stop_at:
                    os.kill(os.getpid(), signal.SIGTERM)
    return run.digest()


def test_a_run_that_is_asked_to_end_saves_and_goes_on(tmp_path, monkeypatch):
    whole = train(tmp_path / "whole")
    with pytest.raises(Preempted) as caught:
        train(tmp_path / "run", stop_at=3)
    assert (caught.value.code, caught.value.step) == (PREEMPTED, 3)
    recorded = json.loads((tmp_path / "run/run.json").read_text())
    assert (recorded["status"], recorded["step"]) == ("preempted", 3)
    # As in a process of its own: within one, a second run goes to a directory below.
    context.taken_directories.clear()
    monkeypatch.setattr(context, "_before", None)
    assert train(tmp_path / "run") == whole
    recorded = json.loads((tmp_path / "run/run.json").read_text())
    assert recorded["status"] == "finished"
    assert recorded["generations"][1]["step"] == 3


@pytest.mark.parametrize("name", ["KILL", "SIGKILL", "stop"])
def test_a_signal_that_no_process_receives_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="expected the name of a signal that a process can handle"):
        chosen_signals({VARIABLE: name})
