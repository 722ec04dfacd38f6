"""Clocks of nodes that are threads."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from lockstep.world import clocks
from tests.unit.threads import Party, together

LABELS = ["node 0 (a)", "node 1 (b)", "node 2 (c)"]


class Clock:
    """A clock that is ahead in some threads."""

    def __init__(self) -> None:
        self._own = threading.local()

    def set_ahead(self, seconds: float) -> None:
        self._own.ahead = seconds

    def time(self) -> float:
        return time.time() + getattr(self._own, "ahead", 0.0)

    @staticmethod
    def monotonic() -> float:
        return time.monotonic()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(clocks, "time", one)
    return one


def compare(clock: Clock, *ahead: float) -> None:
    store = dist.HashStore()

    def take_part(index: int) -> None:
        clock.set_ahead(ahead[index])
        clocks.compare(store, index, LABELS)

    assert together(*(lambda k=index: take_part(k) for index in range(3))) == [None] * 3


def test_clocks_that_agree(clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    compare(clock, 0, 1.0, -1.0)
    assert capfd.readouterr().err == ""


def test_clocks_that_differ_are_named(clock: Clock, capfd: pytest.CaptureFixture[str]) -> None:
    compare(clock, 0, 60, -7200)
    first, second = capfd.readouterr().err.splitlines()
    assert first.startswith(
        "lockstep: warning: the clock of node 1 (b) is 60 s ahead of that of node 0"
    )
    assert "the clock of node 2 (c) is 7200 s behind that of node 0" in second


def test_the_clock_of_node_0_is_the_measure(
    clock: Clock, capfd: pytest.CaptureFixture[str]
) -> None:
    compare(clock, 60, 0, 60)
    assert "node 1 (b) is 60 s behind that of node 0" in capfd.readouterr().err


@pytest.mark.parametrize("there", [(0,), (1, 2)])
def test_whoever_is_gone_is_not_waited_for_long(
    there: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(clocks, "_SECONDS", 0.1)
    store = dist.HashStore()
    calls = [lambda k=index: clocks.compare(store, k, LABELS) for index in there]
    began = time.monotonic()
    assert together(*calls) == [None] * len(there)
    assert time.monotonic() - began < 3
    assert capfd.readouterr().err == ""


def test_the_check_ends_it() -> None:
    def stop() -> None:
        raise InterruptedError

    waiting = Party(lambda: clocks.compare(dist.HashStore(), 1, LABELS, stop))
    assert isinstance(waiting.end(), InterruptedError)
