"""Which failures are followed by a new generation, and how often."""

from __future__ import annotations

import errno
import json
from dataclasses import asdict

import pytest

from lockstep.errors import CheckpointError, RunDirectoryError, WorldError
from lockstep.launch.agent.restarts import DEFAULT, Kind, Restarts, kind
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


def survived(restarts: Restarts, cause: Kind, *, is_run: bool = True, progress: object = 0) -> int:
    """Return how many failures in a row are survived, ten at most."""
    for count in range(10):
        if not restarts.again(cause, progress, is_run=is_run):
            return count
    return 10


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
    restarts = Restarts(limit)
    assert survived(restarts, cause, is_run=is_run) == expected
    assert restarts.count == expected


def test_progress_begins_the_count_anew():
    restarts = Restarts(1)
    for step in range(20):
        assert restarts.again(Kind.SIGNAL, step, is_run=True)
    assert not restarts.again(Kind.SIGNAL, 19, is_run=True)
    assert restarts.count == 20


def test_a_launcher_that_follows_counts_what_others_decide() -> None:
    restarts = Restarts(2)
    restarts.follow("snapshot 1")
    restarts.follow("snapshot 1")
    assert not restarts.again(Kind.SIGNAL, "snapshot 1", is_run=True)
    assert restarts.again(Kind.SIGNAL, "snapshot 2", is_run=True)
    assert restarts.count == 3
