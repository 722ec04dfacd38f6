"""Hang detection: if no rank makes progress, find the rank that others wait for, and its source line.

Each rank counts its calls in memory that it shares with the launcher (`ProgressSlot`). If no count changes
for the hang timeout, the ranks hang: then every rank writes its Python stacks, and the rank that entered
the fewest collective calls is reported as the cause.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.launch.agent.failure import FailureReport, Kind, Verdict
from lockstep.launch.plan import WorkerPlan
from lockstep.state.checkpoint.shared_memory import AFTER_RUN, COLLECTIVES, ProgressSlot
from lockstep.state.files.directory import short
from lockstep.state.record import stacks
from lockstep.state.record.stacks import Frame
from lockstep.world import host

#: Maximum time between two polls that counts as hanging: the launcher itself may have been stopped.
_LONGEST_LOOK = 5.0
#: Polls per hang timeout, and the maximum number of seconds between two polls.
_LOOKS, _LOOK_SECONDS = 10, 1.0
_START = "the start of the run"
#: Seconds that ranks have to write their Python stacks.
_DUMP_SECONDS = 2.0
#: Additional seconds for a launcher whose ranks all wait for a rank of another launcher.
_OTHERS_SECONDS = 5.0
#: Maximum number of ranks in the message about a hang.
_SHOWN = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPosition:
    """Position of one rank in the script during a hang.

    Attributes:
        opened: whether the rank has entered `with lockstep.Run(…)`.
        entered: number of collective calls that the rank has entered.
        waiting: index in `COLLECTIVES` of the call that the rank is in; 0 for none.
        frames: stack of the rank's main thread, innermost frame first; empty if unknown.
        stacks: file with the stacks of all threads, if the rank wrote one.
    """

    worker: WorkerPlan
    opened: bool
    entered: int
    waiting: int
    step: int
    stopped: bool
    frames: tuple[Frame, ...]
    stacks: Path | None

    @property
    def order(self) -> tuple[bool, float, int]:
        """Sort key: stopped ranks first, then the ranks that have made the least progress.

        The first rank is the likely cause of the hang.
        """
        return not self.stopped, self.progress, self.worker.rank

    @property
    def progress(self) -> float:
        """Number of collective calls that the rank has entered, plus 0.5 while it is inside one.

        It is -1 before the rank has entered `lockstep.Run`.
        """
        if not self.opened:
            return -1.0
        return self.entered + (0.5 if self.waiting else 0.0)

    @property
    def place(self) -> str:
        """The rank's current file and line in the user's code, for messages; may be empty."""
        frame = stacks.users(list(self.frames))
        return f" at {frame}" if frame is not None else ""


class HangWatch:
    """Detects a hang of this launcher's ranks: no rank makes progress for a number of seconds.

    Args:
        slots: progress of each rank, in shared memory.
        timeout: seconds without progress of any rank that count as a hang; 0 disables the detection.
    """

    def __init__(self, slots: Sequence[ProgressSlot], timeout: float) -> None:
        self._slots = slots
        self._timeout = timeout
        self._interval = min(_LOOK_SECONDS, timeout / _LOOKS)
        self._looked = time.monotonic()
        self._beats: list[tuple[int, int]] = []
        self._still = 0.0  # seconds without a change

    def look(
        self,
        workers: Sequence[WorkerPlan],
        pids: Mapping[int, int],
        size: int,
        servers: Sequence[WorkerPlan] = (),
    ) -> FailureReport | None:
        """Return a report if no rank has made progress for the timeout, otherwise `None`.

        Call this method several times a second. In the report, `time` is not a time but the
        `RankPosition.progress` of the likely cause. Reports of several launchers are sorted by it: the rank
        with the least progress is blamed. A failure on another launcher is blamed before any hang, unless
        another rank's failure caused it.

        Args:
            workers: all workers of this launcher, in the order of `slots`.
            pids: process ids of the workers and servers that have not ended, by rank.
            size: number of ranks in the launch.
            servers: parameter servers of this launcher; their progress is not watched.
        """
        now = time.monotonic()
        passed = now - self._looked
        if not self._timeout or passed < self._interval:
            return None
        self._looked = now
        beats = self._read()
        is_open = any(beat and waiting != AFTER_RUN for beat, waiting in beats)
        if beats != self._beats or not is_open:
            self._beats, self._still = beats, 0.0
            return None
        self._still += min(passed, _LONGEST_LOOK)
        if self._still < self._timeout:
            return None
        stopped = [one for one in servers if one.rank in pids and is_stopped(pids[one.rank])]
        if stopped:
            return _report(_server_verdict(stopped[0], self._timeout), -2.0)
        return self._examine(workers, pids, size)

    def _read(self) -> list[tuple[int, int]]:
        return [(slot.beat, slot.waiting) for slot in self._slots]

    def _examine(
        self, workers: Sequence[WorkerPlan], pids: Mapping[int, int], size: int
    ) -> FailureReport | None:
        living = [
            (worker, slot, slot.pid or pids[worker.rank])
            for worker, slot in zip(workers, self._slots, strict=False)
            if worker.rank in pids and slot.waiting != AFTER_RUN
        ]
        if not living:
            return None
        all_wait = all(slot.waiting and not is_stopped(pid) for _, slot, pid in living)
        if all_wait and len(living) < size and self._still < self._timeout + _OTHERS_SECONDS:
            return None
        dump([(worker, pid) for worker, _, pid in living])
        if self._beats != self._read():
            self._still = 0.0
            return None  # a rank made progress meanwhile
        positions = [_position(worker, slot, pid) for worker, slot, pid in living]
        behind = min(positions, key=lambda position: position.order)
        # A stopped rank is the cause wherever it is.
        progress = -2.0 if behind.stopped else behind.progress
        return _report(verdict(positions, size, self._timeout), progress)


def _report(verdict: Verdict, progress: float) -> FailureReport:
    return FailureReport(verdict=verdict, consequence=True, time=progress)


def verdict(positions: Sequence[RankPosition], size: int, timeout: float) -> Verdict:
    """Return the message about ranks that hang; the first line names the likely cause.

    `positions`: where each rank of this launcher stands in the script. `size` is the number of ranks in the
    launch, `timeout` the number of seconds without progress.
    """
    cause, *others = sorted(positions, key=lambda position: position.order)
    rank = cause.worker.rank
    what = "is stopped (SIGSTOP)" if cause.stopped else "hangs"
    place = f"rank {rank} of {size} on {socket.gethostname()}"
    lines = [
        f"lockstep: {place} {what}: no rank has moved for {timeout:g} s",
        f"  rank {rank} {_doing(cause)}",
        *(f"  rank {one.worker.rank} {_doing(one)}" for one in others[: _SHOWN - 1]),
    ]
    if len(others) >= _SHOWN:
        lines.append(f"  and {len(others) - _SHOWN + 1} more")
    written = [one.stacks for one in (cause, *others) if one.stacks is not None]
    if written:
        name = "rank-*.stacks" if len(written) > 1 else written[0].name
        lines.append(f"  stacks: {short(written[0].parent / name)}")
    lines += [f"  log: {short(cause.worker.log)}", f"  hint: {_hint(cause)}"]
    return _hang_verdict(lines, cause.worker.name, f"rank {rank} {what}{cause.place}")


def _server_verdict(server: WorkerPlan, timeout: float) -> Verdict:
    """Return the failure message for ranks that hang because a parameter server is stopped.

    `timeout` is the number of seconds without progress.
    """
    what = f"{server.name} is stopped (SIGSTOP)"
    line = f"lockstep: {what} on {socket.gethostname()}: no rank has moved for {timeout:g} s"
    return _hang_verdict([line, f"  log: {short(server.log)}"], server.name, what)


def _hang_verdict(lines: Sequence[str], name: str, brief: str) -> Verdict:
    text, kind = "\n".join(lines), Kind.HANG
    return Verdict(text=text, exit_code=1, name=name, traceback=None, kind=kind, brief=brief)


def _doing(position: RankPosition) -> str:
    if not position.opened:
        return f"has not opened the run yet{position.place}"
    if position.waiting:
        kind = COLLECTIVES[position.waiting if position.waiting < len(COLLECTIVES) else 1]
        step = f" in step {position.step + 1}" if kind != _START else ""
        return f"waits in {kind}{step}{position.place}"
    return f"is in step {position.step + 1}{position.place}"


def _hint(cause: RankPosition) -> str:
    if cause.stopped:
        return "a debugger, kill -STOP or a scheduler that suspends jobs stops a process"
    if cause.waiting:
        return "all ranks wait: over a network that is cut, or in collectives of the script's own"
    return "if it was only slow, --hang-timeout SECONDS gives it longer (0: for ever)"


# --- processes -----------------------------------------------------------------------------------


def dump(workers: Sequence[tuple[WorkerPlan, int]]) -> None:
    """Make workers write their Python stacks, and copy the stacks into the directory of the logs.

    `workers` are pairs of a worker and its process id.
    """
    writing = []
    for worker, pid in workers:
        if not is_stopped(pid) and _handles_signal(pid):
            with contextlib.suppress(OSError):
                os.kill(pid, stacks.SIGNAL)
                writing.append(worker)
    deadline = time.monotonic() + _DUMP_SECONDS
    while not all(map(_frames, writing)) and time.monotonic() < deadline:
        time.sleep(0.02)
    for worker in writing:
        with contextlib.suppress(OSError):  # the failure message has the important lines
            shutil.copyfile(stacks.beside(worker.error_file), worker.log.with_suffix(".stacks"))


def _frames(worker: WorkerPlan) -> list[Frame]:
    """Return the stack of a worker's main thread, innermost frame first; empty if the worker wrote none."""
    with contextlib.suppress(OSError):
        return stacks.main_thread(stacks.beside(worker.error_file).read_text(errors="replace"))
    return []


def _position(worker: WorkerPlan, slot: ProgressSlot, pid: int) -> RankPosition:
    frames = _frames(worker)
    copy = worker.log.with_suffix(".stacks")
    return RankPosition(
        worker=worker,
        opened=slot.beat != 0,
        entered=slot.entered,
        waiting=slot.waiting,
        step=slot.step,
        stopped=is_stopped(pid),
        frames=tuple(frames),
        stacks=copy if frames and copy.exists() else None,
    )


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    return host.process_fields(pid)[:1] in (["T"], ["t"])


def _handles_signal(pid: int) -> bool:
    """Whether a process handles the stack-dump signal; it would end a process without a handler."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "SigCgt":
                return bool(int(value, 16) >> (stacks.SIGNAL - 1) & 1)
    return False
