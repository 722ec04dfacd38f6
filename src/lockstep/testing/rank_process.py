"""Main function of a test rank's process: call a function, and send its result to the test."""

from __future__ import annotations

import ctypes
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class RankReport:
    """Result or error of a test rank, and the moment at which its function ended."""

    value: Any = None
    error: str | None = None
    trace: str = ""
    time: float = 0.0  # moment of the end, by `time.monotonic`
    consequence: bool = False  # whether the error follows from the end of another rank


def run(
    connection: Connection,
    environ: Mapping[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    """Call `function(*args)` in a rank's environment, and send a `RankReport` to the parent process."""
    # A rank must not outlive the test, however the test's process ends.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.update(environ)
    try:
        report = RankReport(value=function(*args), time=time.monotonic())
    except BaseException as error:
        from lockstep.state.record.error_report import is_consequence

        report = RankReport(
            error=f"{type(error).__name__}: {error}",
            trace="".join(traceback.format_exception(error)),
            time=time.monotonic(),
            consequence=is_consequence(error),
        )
    connection.send(report)
    connection.close()
