"""One verdict for a failed launch: the rank that failed first, why, and where to read more."""

from __future__ import annotations

import contextlib
import shlex
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import PREEMPTED
from lockstep.launch.agent.forkserver import Exit
from lockstep.launch.agent.restarts import Kind, kind
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one rank failed.

    Attributes:
        worker: its plan.
        time: when it failed, by this machine's `time.monotonic`.
        report: its exception, where it could describe it.
        exit: how its process ended, where it has ended.
    """

    worker: WorkerPlan
    time: float
    report: Report | None
    exit: Exit | None

    @property
    def consequence(self) -> bool:
        """Whether another rank's failure explains this one."""
        if self.report is not None:
            return self.report.consequence
        # A script started by exec describes nothing; what it printed last says as much.
        ended_itself = self.exit is not None and self.exit.code > 0
        return ended_itself and error_report.blames_peer("\n".join(last_lines(self.worker.log)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What is said about a failed launch.

    Attributes:
        text: the lines for the user.
        exit_code: what the launcher ends with.
        name: of the rank or server that failed first; `None` where it was neither.
        traceback: its Python traceback, where there was one.
        kind: what the failure comes from.
        brief: one line, for a failure that is not the end; by default the first of `text`.
    """

    text: str
    exit_code: int
    name: str | None
    traceback: str | None
    kind: Kind = Kind.SCRIPT
    brief: str = ""

    def __post_init__(self) -> None:
        if not self.brief:
            line = self.text.partition("\n")[0].removeprefix("lockstep: ")
            object.__setattr__(self, "brief", line)


def collect(workers: Iterable[WorkerPlan], exits: Mapping[int, Exit]) -> list[Failure]:
    """Return the failures known so far: workers in `exits`, and those that described an exception."""
    failures = []
    for worker in workers:
        left, told = exits.get(worker.rank), error_report.read(worker.error_file)
        if told is None and left is None:
            continue
        moment = told.time if told else left.time if left else 0.0
        failures.append(Failure(worker=worker, time=moment, report=told, exit=left))
    return failures


def first(failures: Iterable[Failure]) -> Failure:
    """Return the failure that explains the others: the earliest that is not a consequence."""
    return min(failures, key=lambda failure: (failure.consequence, failure.time))


def verdict(
    failures: list[Failure], size: int, *, killed_for_memory: bool | None = None
) -> Verdict:
    """Return the verdict over `failures`.

    Args:
        failures: what `collect` found; at least one.
        size: number of ranks in the launch.
        killed_for_memory: whether the kernel killed a process of this group for memory meanwhile;
            `None` where it doesn't say.
    """
    cause = first(failures)
    name = cause.worker.name
    place = f"{name} of {size}" if cause.worker.rank >= 0 else name
    lines = [
        f"lockstep: {place} failed on {socket.gethostname()}: " + _what(cause, killed_for_memory)
    ]
    lines += _details(cause)
    if killed_for_memory and cause.report is not None:
        lines.append("  the kernel has killed a process of this control group for memory meanwhile")
    lines.append(f"  log: {short(cause.worker.log)}")
    return Verdict(
        text="\n".join(lines),
        exit_code=cause.report.exit_code if cause.report else 1,
        name=name,
        traceback=cause.report.traceback if cause.report else None,
        kind=kind(
            cause.report, cause.exit.code if cause.exit else 1, consequence=cause.consequence
        ),
        brief=f"{name} {_briefly(cause, killed_for_memory)}",
    )


def wall(moment: float) -> float:
    """Return what clocks show at a moment of `time.monotonic`: other machines have their own."""
    return time.time() - (time.monotonic() - moment)


def preempted(step: int, run_dir: Path, command: Sequence[str]) -> Verdict:
    """Return what is said of a run that has saved its state and left: the command that continues it.

    Args:
        step: the step after which it left.
        run_dir: its directory.
        command: what started it, without its directory; empty for a function.
    """
    place = str(short(run_dir))
    how = shlex.join(["lockstep", "run", "--run-dir", place, *command])
    if not command:
        how = f"the same call with run_dir={place!r}"
    text = f"lockstep: preempted after step {step}; to continue: {how}"
    return Verdict(text=text, exit_code=PREEMPTED, name=None, traceback=None)


class MemoryKills:
    """How often the kernel kills a process of this control group for memory."""

    def __init__(self) -> None:
        self._before = oom_kills()

    def grew(self) -> bool | None:
        """Return whether it has since the last time this was asked; `None` where it doesn't say."""
        before, self._before = self._before, oom_kills()
        return None if before is None or self._before is None else self._before > before


def _what(failure: Failure, killed_for_memory: bool | None) -> str:
    if failure.report is not None:
        told = failure.report
        return f"{told.exception}: {told.message}" if told.message else told.exception
    code = failure.exit.code if failure.exit is not None else 1
    if code == 0:
        return "ended inside the run, with exit code 0, and the other ranks waited for it"
    if code > 0:
        return f"exit code {code}"
    return f"killed by signal {-code} ({_signal_name(-code)}): {_likely(-code, killed_for_memory)}"


def _briefly(failure: Failure, killed_for_memory: bool | None) -> str:
    """Return what has happened to a rank, in a few words."""
    told, code = failure.report, failure.exit.code if failure.exit is not None else 1
    if told is not None:
        text = _what(failure, killed_for_memory).partition("\n")[0]
        place = f" ({short(Path(told.file))}:{told.line})" if told.file else ""
        return f"failed: {text}{place}"
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


def _likely(number: int, killed_for_memory: bool | None) -> str:
    if number != signal.SIGKILL or killed_for_memory is None:
        return _CAUSES.get(number, "no usual cause")
    if killed_for_memory:
        return "out of memory, says the kernel"
    return "kill -9 by a user (the kernel counted no kill for memory in this control group)"


def _details(failure: Failure) -> list[str]:
    told = failure.report
    if told is None:
        lines = [f"  | {line}" for line in last_lines(failure.worker.log)]
        return [*lines, _LEFT_HINT] if failure.exit is not None and not failure.exit.code else lines
    lines = []
    if told.file:
        where = f"  at {short(Path(told.file))}:{told.line}"
        lines.append(f"{where} in {told.function}" if told.function else where)
    if told.hint:
        lines.append(f"  hint: {told.hint}")
    return lines


def last_lines(log: Path) -> list[str]:
    """Return the last lines of a log file."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - _LAST_BYTES))
        text = file.read().decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-_LAST_LINES:]
    return []
