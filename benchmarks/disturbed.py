"""Launches whose workers are killed from outside, and what their journals say of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil
from support import one_thread

_HERE = Path(__file__).parent
_CONTESTANTS = _HERE / "contestants"
_LOOK = 0.002


@dataclass(frozen=True)
class Contestant:
    """A way to train in spite of kills.

    Attributes:
        command: starts two ranks; what the script is to be told comes after it.
        shrinks: whether the survivor goes on alone, instead of both starting again.
    """

    command: tuple[str, ...]
    shrinks: bool = False


LOCKSTEP = Contestant(
    (
        *(sys.executable, "-m", "lockstep", "run", "-n", "2", "--run-dir", "run"),
        # Three in a row without a step between them, the default, come about under a kill every 1.4 steps.
        *("--max-restarts", "100"),
        str(_CONTESTANTS / "killed_lockstep.py"),
    )
)
TORCHRUN = Contestant(
    (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("--max-restarts", "100", str(_CONTESTANTS / "killed_by_hand.py")),
    )
)
TORCHFT = Contestant((sys.executable, str(_CONTESTANTS / "torchft_groups.py"), "2"), shrinks=True)


@dataclass(frozen=True)
class Entry:
    """A line of the journal.

    Attributes:
        rank: who wrote it.
        pid: its process.
        step: what it had done; 0 at its beginning.
        participants: how many ranks did that step.
        time: of the clock that `time.time` has.
    """

    rank: int
    pid: int
    step: int
    participants: int
    time: float


class Launch:
    """A launch that is running; use it as a context manager, which ends all its processes.

    Args:
        contestant: who trains.
        directory: empty; where it runs.
        words: what its script is told.
    """

    def __init__(self, contestant: Contestant, directory: Path, words: Sequence[str] = ()) -> None:
        self.contestant, self._directory = contestant, directory
        self._journal = directory / "journal"
        self._journal.touch()
        self._read = 0
        self._lock = threading.Lock()
        self.entries: list[Entry] = []
        env = one_thread()
        env["PYTHONPATH"] = os.pathsep.join([str(_HERE.parent / "examples"), env["PYTHONPATH"]])
        env["BENCHMARK_JOURNAL"] = str(self._journal)
        with (directory / "output").open("wb") as output:
            self._process = subprocess.Popen(
                [*contestant.command, *words],
                env=env,
                cwd=directory,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        tree: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            tree = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        self._process.wait()
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(tree, timeout=10)

    def look(self) -> list[Entry]:
        """Read what is new in the journal; return all of it."""
        with self._lock, self._journal.open("rb") as file:
            file.seek(self._read)
            new = file.read()
            whole = new[: new.rfind(b"\n") + 1]
            self._read += len(whole)
            for line in whole.splitlines():
                *numbers, moment = line.split()
                self.entries.append(Entry(*map(int, numbers), float(moment)))
        return self.entries

    def wait_for(self, wanted: Callable[[Entry], bool], seconds: float, first: int = 0) -> Entry:
        """Return the first entry from number `first` on that is `wanted`.

        Raises:
            TimeoutError: if none comes in time.
            RuntimeError: if the launch ends before.
        """
        deadline = time.monotonic() + seconds
        while True:
            entries = self.look()
            for entry in entries[first:]:
                if wanted(entry):
                    return entry
            first = len(entries)
            if self._process.poll() is not None:
                raise RuntimeError(f"the launch has ended:\n{self.tail()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing for {seconds:.0f} s:\n{self.tail()}")
            time.sleep(_LOOK)

    def tail(self) -> str:
        """Return the end of what it has written."""
        return (self._directory / "output").read_text(errors="replace")[-3000:]

    def kill(self, rank: int) -> float | None:
        """Kill the newest process of `rank`; return when, or `None` if it is not there."""
        pids = [entry.pid for entry in self.look() if entry.rank == rank and entry.step == 0]
        if not pids or not _lives(pids[-1]):
            return None
        moment = time.time()
        os.kill(pids[-1], signal.SIGKILL)
        return moment


def _lives(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
