"""Failures of workers: their kinds, the likely cause, and the message about a failed launch.

Class `Verdict` is this message, with the rank that failed first, the cause and the log.
"""

from __future__ import annotations

import contextlib
import errno
import re
import shlex
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Literal

from lockstep import errors
from lockstep.errors import PREEMPTED
from lockstep.launch.agent.forkserver import Exit
from lockstep.launch.plan import WorkerPlan
from lockstep.state.files.directory import short
from lockstep.state.record import error_report
from lockstep.state.record.error_report import Report
from lockstep.world.cgroups import oom_kills

_LAST_LINES = 8
_LAST_BYTES = 1 << 14
_LEFT_HINT = (
    "  hint: sys.exit and os._exit must not depend on the rank: leave the loops on all ranks, and let "
    "the `with` block end"
)

_CAUSES: dict[int, str] = {
    signal.SIGKILL: "out of memory, or kill -9 by a user",
    signal.SIGTERM: "kill by a user or a scheduler",
    signal.SIGINT: "an interrupt sent to the worker itself",
    signal.SIGSEGV: "a fault in native code: an extension, or a stack that overflowed",
    signal.SIGBUS: "shared memory that is full (/dev/shm), or a mapped file that shrank",
    signal.SIGABRT: "native code gave up: its reason is in the log",
    signal.SIGFPE: "an arithmetic fault in native code",
    signal.SIGILL: "an instruction that this processor does not have",
}


class Kind(StrEnum):
    """Kind of a failure, such as a signal, a hang or an exception of the script.

    The kind decides whether the workers start again.
    """

    SIGNAL = "signal"
    PEER = "peer"  # the end of another rank, whose own failure was not reported
    HANG = "hang"
    LOST = "lost"  # a launcher, or its node
    ENVIRONMENT = "environment"  # disk, network, memory: may not happen again
    SCRIPT = "script"  # an exception that would happen again
    WRONG = "wrong"  # a rank that an audit has found to compute wrongly, and that can be left out
    REFUSED = "refused"  # an error of Lockstep, which would happen again


def _names(kind: type[BaseException]) -> Iterator[str]:
    yield kind.__name__
    for one in kind.__subclasses__():
        yield from _names(one)


#: `errno` values of a disk, a file server, a network or a limit, which may not happen again. Other values
#: are about a path or a call, and would happen again.
_TRANSIENT = frozenset(
    {
        # a device, or a file server that restarts or fails over
        *(errno.EIO, errno.EREMOTEIO, errno.ESTALE, errno.ENOLCK),
        # room that other processes use, and may give back
        *(errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOBUFS),
        *(errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EADDRINUSE),
        # the way to another machine
        *(errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
        *(errno.ENETRESET, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED, errno.EPIPE),
        *(errno.ENOTCONN, errno.ESHUTDOWN),
    }
)
#: Names of operating-system exceptions, which may lack an `errno`.
_SYSTEM = {*_names(ConnectionError), "BlockingIOError", "InterruptedError", "TimeoutError"}
#: Names of exceptions of torch (memory, devices, process groups) and the standard library that may not
#: happen again.
_ENVIRONMENT = {
    *("MemoryError", "OutOfMemoryError", "AcceleratorError"),
    *("DistBackendError", "DistNetworkError", "DistStoreError"),
    *("HTTPError", "IncompleteRead", "SSLError", "URLError"),
}
#: Messages of `RuntimeError` that torch raises for a failure of the machine.
_PHRASES = re.compile(
    r"DataLoader worker .*(killed|exited)|can't allocate memory|cannot allocate memory"
    r"|too many open files|no space left on device|unable to (open|mmap|write).*shared memory"
    r"|CUDA error|HIP error|NCCL error|CUBLAS_STATUS|CUDNN_STATUS",
    re.IGNORECASE | re.DOTALL,
)


def kind(report: Report | None, code: int, *, consequence: bool) -> Kind:
    """Return the kind of a rank's failure.

    `report` describes the rank's exception; `None` if the rank wrote none. `code` is the exit code, or
    minus the signal that ended the rank. `consequence` is whether another rank's failure caused this one.
    """
    if report is not None and report.wrong is not None:
        return Kind.WRONG
    if report is not None and report.exception == errors.EarlyExitError.__name__:
        return Kind.REFUSED  # the script would do the same again
    if consequence:
        return Kind.PEER
    if report is None:
        return Kind.SIGNAL if code < 0 else Kind.SCRIPT
    if _is_transient(report):
        return Kind.ENVIRONMENT
    is_own = report.exception in set(_names(errors.LockstepError))
    return Kind.REFUSED if is_own else Kind.SCRIPT


def _is_transient(report: Report) -> bool:
    """Return whether the failure in `report` was caused by the machine and may not happen again.

    Such causes are errors of the disk, the network or the memory.
    """
    if report.exception in set(_names(errors.UsageError)):
        return False
    if _TRANSIENT.intersection(report.errnos) or report.exception in _ENVIRONMENT:
        return True
    if report.exception in _SYSTEM:
        return not report.errnos
    # An OSError without a number comes from a library, for example for a damaged file: not transient.
    return report.exception == "RuntimeError" and bool(_PHRASES.search(report.message))


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Failure of one worker: its exception, or the exit of its process.

    Attributes:
        time: moment of the failure, by this machine's `time.monotonic`.
        report: the worker's report of its exception; `None` if it wrote none.
        exit: exit of the process; `None` while it runs.
    """

    worker: WorkerPlan
    time: float
    report: Report | None
    exit: Exit | None

    @property
    def consequence(self) -> bool:
        """Whether another rank's failure caused this one, for example by closing a connection."""
        if self.report is not None:
            return self.report.consequence
        # A script started by exec writes no report; search its last lines of output.
        return self.code > 0 and error_report.blames_peer("\n".join(last_lines(self.worker.log)))

    @property
    def code(self) -> int:
        """Exit code of the process, or minus the signal that ended it; 1 while the process runs."""
        return 1 if self.exit is None else self.exit.code


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The message about a failed launch, with the launcher's exit code.

    Attributes:
        text: the lines printed for the user.
        name: name of the rank or parameter server that failed first, or that computes wrongly, such as
            `rank 1`; `None` if unknown.
        traceback: Python traceback of that process, if it raised an exception.
        brief: one line, printed when the workers start again; by default the first line of `text`.
        wrong: rank that an audit has found to compute wrongly.
    """

    text: str
    exit_code: int
    name: str | None
    traceback: str | None
    kind: Kind = Kind.SCRIPT
    brief: str = ""
    wrong: int | None = None

    def __post_init__(self) -> None:
        if not self.brief:
            line = self.text.partition("\n")[0].removeprefix("lockstep: ")
            object.__setattr__(self, "brief", line)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReport:
    """Report of a failure of a launcher's workers.

    Attributes:
        verdict: the failure message.
        consequence: whether the failure only follows from another rank's failure.
        time: moment of the failure, in Unix seconds.
    """

    verdict: Verdict
    consequence: bool
    time: float

    @property
    def order(self) -> tuple[bool, float]:
        """Sort key of reports: causes before consequences, then by the time of the failure."""
        return self.consequence, self.time


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Decision of launcher 0 on how a launch goes on; all launchers carry it out.

    Attributes:
        kind: `restart` starts the workers again, `round` first begins a new rendezvous round with
            other launchers, `end` ends a failed launch, and `done` ends a successful one.
        text: message for the user.
        verdict: failure message, with kind `end`.
        staying: indices of the launchers that are expected in the next rendezvous round.
    """

    kind: Literal["restart", "round", "end", "done"]
    text: str = ""
    verdict: Verdict | None = None
    staying: tuple[int, ...] = ()

    @property
    def is_last(self) -> bool:
        """Whether the decision ends the rendezvous round, in which the launchers stay the same."""
        return self.kind != "restart"


#: Restart policy: returns the message to print if workers are to start again; `None` if not.
Policy = Callable[[Verdict], str | None]


def collect(workers: Iterable[WorkerPlan], exits: Mapping[int, Exit]) -> list[Failure]:
    """Return a `Failure` for each worker that has exited or has written an error file.

    `exits` are the exits of failed processes, by rank.
    """
    failures = []
    for worker in workers:
        left, report = exits.get(worker.rank), error_report.read(worker.error_file)
        first = report or left
        if first is not None:
            failures.append(Failure(worker=worker, time=first.time, report=report, exit=left))
    return failures


def first(failures: Iterable[Failure]) -> Failure:
    """Return the failure that likely caused the others.

    It is the earliest failure that does not follow from another rank's failure. If all failures do, it is
    the earliest of all.
    """
    return min(failures, key=lambda failure: (failure.consequence, failure.time))


def verdict(
    failures: list[Failure], size: int, *, killed_for_memory: bool | None = None
) -> Verdict:
    """Return the message about the failures in a launch of `size` ranks.

    `killed_for_memory` is whether the kernel's out-of-memory killer ended a process of this control group;
    `None` if unknown.
    """
    cause = first(failures)
    name, wrong = cause.worker.name, None if cause.report is None else cause.report.wrong
    place = f"{name} of {size}" if cause.worker.rank >= 0 else name
    what = _what(cause, killed_for_memory)
    lines = [f"lockstep: {place} failed on {socket.gethostname()}: {what}", *_details(cause)]
    if killed_for_memory and cause.report is not None:
        lines.append("  the kernel has killed a process of this control group for memory meanwhile")
    lines.append(f"  log: {short(cause.worker.log)}")
    return Verdict(
        text="\n".join(lines),
        exit_code=cause.report.exit_code if cause.report else 1,
        name=name if wrong is None else f"rank {wrong}",
        traceback=cause.report.traceback if cause.report else None,
        kind=kind(cause.report, cause.code, consequence=cause.consequence),
        brief=f"{name} {_briefly(cause, what, killed_for_memory)}"
        if wrong is None
        else what.removeprefix("WrongRankError: "),
        wrong=wrong,
    )


def wall(moment: float) -> float:
    """Convert a `time.monotonic` value of this machine to Unix time, which machines can compare."""
    return time.time() - (time.monotonic() - moment)


def preempted(step: int, run_dir: Path, command: Sequence[str]) -> Verdict:
    """Return the message about a preempted run, with the command that resumes it.

    `step` is the number of steps done. `command` is the command line of the launch, without the run
    directory; it is empty if `lockstep.launch` runs a function.
    """
    place = str(short(run_dir))
    how = shlex.join(["lockstep", "run", "--run-dir", place, *command])
    if not command:
        how = f"the same call with run_dir={place!r}"
    text = f"lockstep: preempted after step {step}; to continue: {how}"
    return Verdict(text=text, exit_code=PREEMPTED, name=None, traceback=None)


class MemoryKills:
    """Detects kills by the kernel's out-of-memory killer in this process's control group."""

    def __init__(self) -> None:
        self._before = oom_kills()

    def grew(self) -> bool | None:
        """Return whether the out-of-memory killer has killed a process since the last call.

        Returns `None` if the kernel keeps no count of these kills.
        """
        before, self._before = self._before, oom_kills()
        return None if before is None or self._before is None else self._before > before


def _what(failure: Failure, killed_for_memory: bool | None) -> str:
    report, code = failure.report, failure.code
    if report is not None:
        return f"{report.exception}: {report.message}" if report.message else report.exception
    if code == 0:
        return "ended inside the run, with exit code 0, and the other ranks waited for it"
    if code > 0:
        return f"exit code {code}"
    cause = _CAUSES.get(-code, "no usual cause")
    if code == -signal.SIGKILL and killed_for_memory is not None:
        cause = "kill -9 by a user (the kernel counted no kill for memory in this control group)"
        if killed_for_memory:
            cause = "out of memory, says the kernel"
    return f"killed by signal {-code} ({_signal_name(-code)}): {cause}"


def _briefly(failure: Failure, what: str, killed_for_memory: bool | None) -> str:
    """Return one short line that says how a process failed, without the name of the process.

    `what`: the full description; its first line is used if the process reported an exception.
    `killed_for_memory`: whether the kernel's out-of-memory killer has ended a process; `None` if unknown.
    """
    report, code = failure.report, failure.code
    if report is not None:
        place = f" ({short(Path(report.file))}:{report.line})" if report.file else ""
        return "failed: " + what.partition("\n")[0] + place
    if code >= 0:
        return f"ended with exit code {code}"
    if -code == signal.SIGKILL and killed_for_memory:
        return "was killed by the kernel: out of memory"
    return f"was killed by signal {-code} ({_signal_name(-code)})"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _details(failure: Failure) -> list[str]:
    report = failure.report
    if report is None:
        lines = [f"  | {line}" for line in last_lines(failure.worker.log)]
        return lines if failure.code else [*lines, _LEFT_HINT]
    lines = []
    if report.file:
        where = f"  at {short(Path(report.file))}:{report.line}"
        lines.append(f"{where} in {report.function}" if report.function else where)
    if report.hint:
        lines.append(f"  hint: {report.hint}")
    return lines


def last_lines(log: Path) -> list[str]:
    """Return the last eight non-empty lines of a log file; an empty list if it is unreadable."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _LAST_BYTES))
        text = file.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-_LAST_LINES:]
    return []
