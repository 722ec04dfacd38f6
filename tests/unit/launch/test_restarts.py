"""Which failures are followed by a new generation, and how often."""

from __future__ import annotations

import errno
import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from lockstep.errors import CheckpointError, RunDirectoryError, WorldError
from lockstep.launch.agent.failure import Kind, Verdict, kind
from lockstep.launch.agent.restarts import DEFAULT, Restarts
from lockstep.state.record.error_report import Report, describe


def told(exception: str, message: str = "") -> Report:
    """Return the report of an exception."""
    return Report(rank=0, exception=exception, message=message)


@pytest.mark.parametrize(
    ("exception", "message", "expected"),
    [
        ("OSError", "x.jpg: image file is truncated (4 bytes not processed)", Kind.SCRIPT),
        ("BrokenPipeError", "", Kind.ENVIRONMENT),
        ("TimeoutError", "", Kind.ENVIRONMENT),
        ("MemoryError", "", Kind.ENVIRONMENT),
        ("OutOfMemoryError", "CUDA out of memory", Kind.ENVIRONMENT),
        ("AcceleratorError", "CUDA error: unspecified launch failure", Kind.ENVIRONMENT),
        (
            "RuntimeError",
            "DataLoader worker (pid 17) is killed by signal: Killed.",
            Kind.ENVIRONMENT,
        ),
        ("RuntimeError", "DataLoader worker (pid(s) 3, 4) exited unexpectedly", Kind.ENVIRONMENT),
        ("RuntimeError", "[enforce fail at alloc_cpu.cpp] can't allocate memory", Kind.ENVIRONMENT),
        ("RuntimeError", "CUDA error: an illegal memory access", Kind.ENVIRONMENT),
        ("RuntimeError", "mat1 and mat2 shapes cannot be multiplied", Kind.SCRIPT),
        ("FileNotFoundError", "data.csv", Kind.SCRIPT),
        ("ValueError", "No space left on device", Kind.SCRIPT),
        ("KeyError", "'x'", Kind.SCRIPT),
        ("LoaderError", "", Kind.REFUSED),
        ("UsageError", "", Kind.REFUSED),
        ("PeerError", "", Kind.REFUSED),  # one that is no consequence: see below
    ],
)
def test_what_an_exception_comes_from(exception, message, expected):
    assert kind(told(exception, message), 1, consequence=False) is expected


def caused(error: BaseException, cause: BaseException) -> BaseException:
    """Return an exception as one that has been raised from another."""
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), Kind.ENVIRONMENT),
        (PermissionError(errno.EACCES, "Permission denied"), Kind.SCRIPT),
        (OSError("[Errno 5] Input/output error"), Kind.ENVIRONMENT),  # of a DataLoader worker
        (ValueError("[Errno 5] Input/output error"), Kind.SCRIPT),
        *(
            (caused(kind("it cannot be written"), OSError(number, "")), Kind.ENVIRONMENT)
            for kind in (CheckpointError, RunDirectoryError, RuntimeError)
            for number in (errno.EIO, errno.ESTALE, errno.ENOSPC, errno.EDQUOT, errno.ETIMEDOUT)
        ),
        *(
            (caused(CheckpointError("it cannot be written"), OSError(number, "")), Kind.REFUSED)
            for number in (errno.EACCES, errno.EROFS, errno.ENOENT, errno.EFBIG)
        ),
        (caused(WorldError("the port is taken"), OSError(errno.EADDRINUSE, "")), Kind.REFUSED),
    ],
    ids=repr,
)
def test_the_number_of_a_system_error_counts_wherever_it_is_among_the_causes(error, expected):
    report = describe(error, 0, None)
    assert kind(Report(**json.loads(json.dumps(asdict(report)))), 1, consequence=False) is expected


def test_what_an_end_without_exception_comes_from():
    assert kind(None, -9, consequence=False) is Kind.SIGNAL
    assert kind(None, 5, consequence=False) is Kind.SCRIPT
    assert kind(None, 1, consequence=True) is Kind.PEER
    assert kind(told("PeerError"), 1, consequence=True) is Kind.PEER


class Progress:
    """Progress of ranks that have opened a run, or not."""

    def __init__(self, *, opened: bool = True) -> None:
        self.opened, self.snapshot, self.origin = opened, 0, ", from a snapshot"


def policy(limit: int | None, *, is_run: bool = True) -> tuple[Restarts, Progress]:
    """Return a restart policy, and the progress that it looks at."""
    progress: Any = Progress(opened=is_run)
    return Restarts(limit, progress, uses_lockstep=False), progress


def failed(cause: Kind) -> Verdict:
    return Verdict(
        text="lockstep: rank 1 failed", exit_code=1, name=None, traceback=None, kind=cause
    )


@pytest.mark.parametrize(
    ("limit", "cause", "is_run", "expected"),
    [
        (None, Kind.SIGNAL, True, DEFAULT),
        (None, Kind.HANG, True, DEFAULT),
        (None, Kind.LOST, True, DEFAULT),
        (None, Kind.PEER, True, DEFAULT),
        (None, Kind.ENVIRONMENT, True, DEFAULT),
        (None, Kind.SCRIPT, True, 0),
        (None, Kind.SIGNAL, False, 0),
        (None, Kind.ENVIRONMENT, False, 0),
        (2, Kind.SCRIPT, True, 2),
        (2, Kind.SCRIPT, False, 2),
        (2, Kind.SIGNAL, False, 2),
        (0, Kind.SIGNAL, True, 0),
        (2, Kind.REFUSED, True, 0),
        (None, Kind.REFUSED, True, 0),
    ],
)
def test_how_often_without_progress(limit, cause, is_run, expected):
    restarts, _ = policy(limit, is_run=is_run)
    messages = [restarts.decide(failed(cause)) for _ in range(10)]
    text = "rank 1 failed; restart {}, from a snapshot"
    again = [text.format(number) for number in range(1, expected + 1)]
    assert messages == [*again, *[None] * (10 - expected)]


@pytest.mark.parametrize("leaves_out", [True, False])
def test_a_rank_that_computes_wrongly_is_left_out_where_that_is_possible(leaves_out):
    progress: Any = Progress()
    restarts = Restarts(None, progress, uses_lockstep=True, leaves_out=leaves_out)
    message = restarts.decide(replace(failed(Kind.WRONG), brief="rank 2 is odd", wrong=2))
    state = "the newest state that an audit has confirmed"
    expected = f"rank 2 is odd; restart 1 without rank 2, from {state}"
    assert message == (expected if leaves_out else None)


def test_progress_begins_the_count_anew():
    restarts, progress = policy(1)
    for step in range(20):
        progress.snapshot = step
        assert restarts.decide(failed(Kind.SIGNAL)) is not None
    assert restarts.decide(failed(Kind.SIGNAL)) is None


def test_a_launcher_counts_restarts_that_another_decides() -> None:
    restarts, progress = policy(2)
    restarts.count_restart()
    restarts.count_restart()
    assert restarts.decide(failed(Kind.SIGNAL)) is None
    progress.snapshot = 2
    message = restarts.decide(failed(Kind.SIGNAL))
    assert message is not None
    assert "restart 3" in message
