"""A child that hangs or crashes is given up on, and what it said is told."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from lockstep.launch.agent.child import Child, LostError, bounded


def crash(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def fail(_: Any) -> None:
    raise OSError(5, "input/output error")


def test_a_child_returns_what_its_function_does() -> None:
    child = Child(lambda words: [os.getpid(), *words]).give(["a", 1])
    assert child.result(10) == [child.pid, "a", 1]


@pytest.mark.parametrize(
    ("work", "seconds", "text"),
    [
        (lambda _: time.sleep(60), 0.2, "no answer within 0.2 s"),
        (crash, 10, "the process that looked at it was ended by SIGUSR1"),
        (fail, 10, r"OSError: \[Errno 5\] input/output error"),
        (os._exit, 10, "ended by exit code 7"),
    ],
)
def test_a_child_that_does_not_return(
    work: Callable[[Any], Any], seconds: float, text: str
) -> None:
    child = Child(work).give(7)
    with pytest.raises(LostError, match=text):
        child.result(seconds)
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)


def test_a_call_that_does_not_return_is_given_up_on() -> None:
    with pytest.raises(LostError, match="no answer within"):
        bounded(lambda: time.sleep(0.5), 0.05)
    assert bounded(lambda: 7, 5) == 7
    with pytest.raises(ZeroDivisionError):
        bounded(lambda: 1 / 0, 5)
