"""`run_ranks` and `assert_same`: run a function on several local ranks, with a timeout, and compare."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Any

from lockstep.errors import CheckFailedError, LockstepError
from lockstep.testing import rank_process
from lockstep.testing.rank_process import RankReport

_GRACE_SECONDS = 2.0  # for the reports of other ranks, once one has failed


class RankError(LockstepError):
    """Raised if a rank raised an exception or died.

    Attributes:
        rank: number of the rank that failed first.
    """

    def __init__(self, rank: int, what: str, trace: str = "") -> None:
        super().__init__(f"rank {rank}: {what}" + (f"\n{trace}" if trace else ""))
        self.rank = rank


class RankTimeoutError(LockstepError):
    """Raised if ranks were still running at the timeout."""


@dataclass(slots=True)
class _Rank:
    process: ForkServerProcess
    connection: Connection
    report: RankReport | None = None
    has_ended: bool = False


def run_ranks(
    function: Callable[..., Any],
    n: int,
    *args: Any,
    timeout: float = 60.0,
    environ: Mapping[str, str] | None = None,
) -> list[Any]:
    """Run `function(*args)` on `n` ranks of this machine; return a list of its return values, by rank.

    Every rank is a process with the variables of `env://`; this process hosts the store, on a free port.
    Ranks are forked from a server process that has imported torch and Lockstep: they start fast, and
    share no state with this process.

    Args:
        function: a function that can be imported; it is pickled by name.
        n: number of ranks.
        args: arguments of `function`; they are pickled.
        timeout: seconds after which all ranks are killed.
        environ: further environment variables.

    Raises:
        RankError: if a rank raised an exception or was killed; it has the traceback of the first failure.
        RankTimeoutError: if ranks still run at the timeout.
    """
    store = _host_store()
    ranks = [
        _start(function, args, _environment(rank, n, store.port, environ)) for rank in range(n)
    ]
    try:
        _collect(ranks, timeout)
    finally:
        _end(ranks)
    return [rank.report.value for rank in ranks if rank.report is not None]


def _host_store() -> Any:
    import socket

    import torch.distributed as dist

    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    return dist.TCPStore(
        "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
        master_listen_fd=listener.detach(),
    )


def _environment(rank: int, n: int, port: int, more: Mapping[str, str] | None) -> dict[str, str]:
    return {
        "LOCKSTEP_LAUNCHER": "testing",
        "RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(n),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        **(more or {}),
    }


def _start(function: Callable[..., Any], args: tuple[Any, ...], environ: dict[str, str]) -> _Rank:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lockstep.testing.preload"])
    here, there = context.Pipe(duplex=False)
    process = context.Process(
        target=rank_process.run, args=(there, environ, function, args), daemon=False
    )
    process.start()
    there.close()
    return _Rank(process, here)


def _collect(ranks: Sequence[_Rank], timeout: float) -> None:
    """Wait until all ranks have ended, and receive their results.

    Raises:
        RankError: if a rank failed; it has the traceback of the first failure.
        RankTimeoutError: if a rank still runs at the timeout.
    """
    deadline = time.monotonic() + timeout
    failed = False
    while running := [rank for rank in ranks if not rank.has_ended]:
        ready = wait([rank.connection for rank in running], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in running:
            if rank.connection in ready:
                rank.has_ended = True
                with contextlib.suppress(EOFError):
                    rank.report = rank.connection.recv()
                if not failed and (rank.report is None or rank.report.error is not None):
                    failed = True
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    for number, rank in enumerate(ranks):
        if rank.has_ended and rank.report is None:
            rank.process.join()
            raise RankError(number, f"died with exit code {rank.process.exitcode}")
    reports = [(rank.report, number) for number, rank in enumerate(ranks) if rank.report]
    errors = [(report, number) for report, number in reports if report.error]
    if errors:
        report, number = min(errors, key=lambda pair: (pair[0].consequence, pair[0].time))
        raise RankError(number, report.error or "", report.trace)
    slow = [str(number) for number, rank in enumerate(ranks) if not rank.has_ended]
    if slow:
        raise RankTimeoutError(
            f"rank {', '.join(slow)} of {len(ranks)} still ran after {timeout:g} s",
            hint="give a longer timeout, or look for a collective that not all ranks call",
        )


def _end(ranks: Sequence[_Rank]) -> None:
    for rank in ranks:
        if not rank.has_ended:
            rank.process.kill()
        rank.process.join()
        rank.process.close()
        rank.connection.close()


def assert_same(
    function: Callable[..., Any],
    layouts: Iterable[int],
    *args: Any,
    replicas: int,
    timeout: float = 60.0,
) -> Any:
    """Run `function(*args)` on each number of ranks in `layouts`; check that all return the same value.

    Args:
        function: a function that can be imported; it trains, and returns for example `run.digest()`.
        layouts: numbers of ranks.
        args: arguments of `function`.
        replicas: number of replicas (logical data-parallel workers, one or more on each rank), which is
            the same on all layouts.
        timeout: seconds for each layout.

    Raises:
        CheckFailedError: if a rank of a layout returned another value than the first one.
        RankError: if a rank failed.
        RankTimeoutError: at the timeout of a layout.
    """
    environ = {"LOCKSTEP_REPLICAS": str(replicas)}
    first: list[Any] = []
    for n in layouts:
        values = run_ranks(function, n, *args, timeout=timeout, environ=environ)
        first = first or values[:1]
        for rank, value in enumerate(values):
            if value != first[0]:
                raise CheckFailedError(
                    f"rank {rank} of {n} returned {value!r}; expected {first[0]!r}, as on the "
                    "first layout",
                    hint="`lockstep verify` names the first step of a script that differs",
                )
    return first[0]
