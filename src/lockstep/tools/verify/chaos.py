"""Kill random workers of a running launch at random moments, such as half a step after step 30.

Kills hit every kind of moment: before the first step, inside of steps and exchanges, while a snapshot is
written, in evaluations, in the last step, and while workers are restarted.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from lockstep.state.record.reading import LineReader
from lockstep.tools.verify.traces import generations

Value = TypeVar("Value")

#: Share of the kills that come soon after a (re)start, without waiting for a step.
_HASTY = 0.2
#: Longest wait, in seconds after a (re)start, for a kill that waits for no step; the first step ends it.
_START_SECONDS = 0.6
_LOOK = 0.002
_LOOK_FOR_WORKERS = 0.02
_LOOK_FOR_GENERATIONS = 0.02
#: Seconds after a kill in which the launcher may still start workers of the killed generation.
_SAME_GENERATION = 0.02
#: Assumed seconds of a step until one has been measured.
_PACE = 0.01


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill of a random worker: a random moment, and a random number that chooses the worker."""

    step: int  # number of steps that the run must have done
    hasty: bool  # whether the kill does not wait for a step after the previous kill
    delay: float  # delay of the kill, from 0 to 1: as a part of a step, or of `_START_SECONDS`
    choice: float  # chooses the worker, from 0 to 1


def draw(kills: int, seed: int, steps: int) -> list[Kill]:
    """Return `kills` random kills in a run of `steps` steps, drawn from `seed`, in order of time.

    If there are several, one comes before the first step and one in the last step.
    """
    dice = random.Random(seed)  # noqa: S311 - it need not be hard to guess
    ends = [0, steps - 1] if kills > 1 else []
    moments = sorted(ends + [dice.randrange(steps) for _ in range(kills - len(ends))])
    return [
        Kill(step, step == 0 or dice.random() < _HASTY, dice.random(), dice.random())
        for step in moments
    ]


class Chaos:
    """Kills worker processes of one launch at given random moments."""

    def __init__(self, launcher: subprocess.Popen[bytes], trace: Path, steps: int) -> None:
        self._launcher = launcher
        self._workers = _Workers(launcher.pid)
        self._seen = _Progress(trace)
        self._last = steps - 1

    def work(self, kills: Sequence[Kill]) -> int:
        """Carry out `kills` in order; return the number of kills done before the launch ended."""
        for done, kill in enumerate(kills):
            while not self._kill(kill):
                # No worker has started yet, or all ended before the moment of the kill.
                if self._launcher.poll() is not None:
                    return done
                time.sleep(_LOOK_FOR_WORKERS)
            self._seen.forget()
        return len(kills)

    def _kill(self, kill: Kill) -> bool:
        """Wait for the moment of `kill` and kill a worker; return whether a worker was killed."""
        if not self._workers.arrive():
            return False
        # If all steps are done, restarted workers may end before a delayed kill.
        if kill.hasty and self._seen.highest <= self._last:
            moment = time.monotonic() + kill.delay * _START_SECONDS
            while time.monotonic() < moment and not self._seen.moved:
                time.sleep(_LOOK)
                self._seen.look()
            self._workers.arrive()
            return self._workers.kill(kill.choice)
        while True:
            self._seen.look()
            # After the last step but one no further step may be recorded before the run ends.
            moved = self._seen.moved or self._seen.highest >= self._last
            if moved and self._seen.highest >= kill.step:
                break
            if not self._workers.live():
                return False
            time.sleep(_LOOK)
        moment = time.monotonic() + kill.delay * self._seen.pace
        self._workers.arrive()
        time.sleep(max(0.0, moment - time.monotonic()))
        return self._workers.kill(kill.choice)


class _Workers:
    """The worker processes below a launcher, found by their standard output: a pipe or a log file."""

    def __init__(self, launcher: int) -> None:
        self._launcher = launcher
        self._now: list[psutil.Process] = []
        self._killed: set[psutil.Process] = set()

    def arrive(self) -> bool:
        """Find the workers that have started since the last kill; return whether there are any."""
        self._now = [one for one in self._all() if one not in self._killed]
        return bool(self._now)

    def live(self) -> bool:
        """Return whether any of the workers that `arrive` has found is still running."""
        return any(_lives(one) for one in self._now)

    def kill(self, choice: float) -> bool:
        """Kill one of the found workers; return `False` if none is running.

        `choice`, from 0 to 1, selects the worker.
        """
        victims = [one for one in self._now if _lives(one)]
        if not victims:
            return False
        victims[int(choice * len(victims))].kill()
        moment = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._killed.update(self._now)
        # A worker may have been started just after `arrive`, and finding all may take as long as a restart.
        late = [one for one in self._all() if _born(one) < moment + _SAME_GENERATION]
        self._killed.update(late)
        return True

    def _all(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            below = psutil.Process(self._launcher).children(recursive=True)
            caught = {one.pid for one in below if _is_caught(one)}
            # Children of a worker, such as DataLoader workers, inherit its output and are left out.
            return [one for one in below if one.pid in caught and _read(one.ppid, 0) not in caught]
        return []


def _is_caught(process: psutil.Process) -> bool:
    """Return whether the standard output of a process is a pipe or a log file.

    This holds for workers, whose output the launcher reads.
    """
    place = _read(lambda: str(Path(f"/proc/{process.pid}/fd/1").readlink()), "")
    return place.startswith("pipe:") or place.endswith(".log")


def _born(process: psutil.Process) -> float:
    """Return the start time of a process, in seconds since boot."""
    text = _read(Path(f"/proc/{process.pid}/stat").read_text, "")
    ticks = text.rpartition(")")[2].split()[19:20] or ["0"]
    return int(ticks[0]) / os.sysconf("SC_CLK_TCK")


def _lives(process: psutil.Process) -> bool:
    return _read(
        lambda: process.is_running() and process.status() != psutil.STATUS_ZOMBIE, default=False
    )


def _read(fact: Callable[[], Value], default: Value) -> Value:
    """Call `fact`, which reads a property of a process; return `default` if the process has ended."""
    try:
        return fact()
    except (psutil.NoSuchProcess, OSError):
        return default


class _Progress:
    """The progress of a run, read from its growing trace files: steps done and their speed."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace
        self._files: list[Path] = []
        self._scanned = 0.0
        self._readers: dict[Path, LineReader] = {}
        self._times: deque[float] = deque(maxlen=20)
        self._step: tuple[int, float] | None = None
        self.highest = 0
        self.moved = False

    @property
    def pace(self) -> float:
        """Median of the seconds per step over the newest steps; a guess until one is measured."""
        return statistics.median(self._times) if self._times else _PACE

    def forget(self) -> None:
        """Mark that no step was done since the last kill; the highest step is kept."""
        self.look()
        self.moved = False
        self._step = None

    def look(self) -> None:
        """Read the new lines of the run's trace files, and update the progress."""
        if time.monotonic() > self._scanned + _LOOK_FOR_GENERATIONS:
            found = generations(self._trace)
            self._files = [*found[max(found)].values()] if found else []
            self._scanned = time.monotonic()
        for path in self._files:
            for line in self._readers.setdefault(path, LineReader(path)).lines():
                if b'"step"' in line and (entry := json.loads(line))["kind"] == "step":
                    self._take(entry["step"])

    def _take(self, step: int) -> None:
        now = time.monotonic()
        if self._step is not None and step > self._step[0]:
            self._times.append((now - self._step[1]) / (step - self._step[0]))
        if self._step is None or step > self._step[0]:
            self._step = (step, now)
        self.highest = max(self.highest, step)
        self.moved = True
