"""Workers that take long to end: no generation begins beside them."""

from __future__ import annotations

import math
import signal
from typing import Any

import pytest

from lockstep.launch.agent import forkserver
from lockstep.launch.agent.forkserver import LAST_GRACE, Exit, Workers
from lockstep.launch.agent.interrupts import Interrupted, Interrupts


class Server:
    """A fork server with one worker, which ends `seconds` after the start of the server's own clock."""

    def __init__(self, seconds: float) -> None:
        self.now, self._end = 0.0, seconds

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def signal(self, *_: object, **__: object) -> None:
        """Begin to end the worker."""

    def poll(self) -> list[Exit]:
        left = Exit(rank=0, pid=7, code=-signal.SIGKILL, time=self.now)
        return [left] if self.now >= self._end else []


def one_worker(server: Any, interrupts: Interrupts, monkeypatch: pytest.MonkeyPatch) -> Workers:
    monkeypatch.setattr(forkserver, "time", server)
    output: Any = None
    found = Workers(server, output, interrupts, lambda: None)
    found.started[0], found._names[0] = 7, "rank 0"
    return found


def test_a_worker_that_sigkill_does_not_end_at_once_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    killed = one_worker(Server(5.5 * LAST_GRACE), Interrupts(), monkeypatch)
    killed.kill()
    assert killed.living == {}
    (told,) = capfd.readouterr().err.splitlines()
    assert "SIGKILL has not ended rank 0 (process 7) within 30 s" in told


def test_a_second_signal_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    repeated = Interrupts(first=signal.SIGINT, count=2)
    killed = one_worker(Server(math.inf), repeated, monkeypatch)
    with pytest.raises(Interrupted):
        killed.kill()
