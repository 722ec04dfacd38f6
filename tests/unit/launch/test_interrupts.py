"""Signals to the launcher: which of them count."""

from __future__ import annotations

import signal

import pytest

from lockstep.launch.agent import interrupts
from lockstep.launch.agent.interrupts import Interrupted, Interrupts


def test_a_second_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    heard = Interrupts()
    heard.receive(signal.SIGTERM)
    assert (heard.is_preemption, heard.is_repeated) == (True, False)
    heard.receive(signal.SIGTERM)
    assert (heard.is_preemption, heard.is_repeated) == (False, True)
    with pytest.raises(Interrupted):
        heard.check()


def test_slurm_says_at_once_twice_that_a_job_is_preempted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    now = 100.0
    monkeypatch.setattr(interrupts.time, "monotonic", lambda: now)
    heard = Interrupts()
    heard.receive(signal.SIGTERM)
    heard.receive(signal.SIGTERM)
    assert (heard.is_preemption, heard.is_repeated) == (True, False)
    now += 2
    heard.receive(signal.SIGTERM)
    assert heard.is_repeated


def test_another_signal_under_slurm_counts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    heard = Interrupts()
    heard.receive(signal.SIGTERM)
    heard.receive(signal.SIGINT)
    assert heard.is_repeated
