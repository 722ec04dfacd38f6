"""One trial: the script on one combination, in a launch of its own."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from lockstep.errors import PREEMPTED
from lockstep.launch.command import RunCommand, verdict_in
from lockstep.launch.devices.gpus import Gpu
from lockstep.state.files import run_file
from lockstep.state.record.reading import Recorded
from lockstep.tools.bench.combinations import Combination
from lockstep.tools.bench.measuring import Measured, measure, restart_seconds

#: Seconds of training before the kill of a measured restart.
_BEFORE_KILL = 3.0
_TOO_SHORT = (
    "the run has {} steps, of which the first warms up; expected at least 2 of each rank\n"
    "hint: arguments for the script come after `--`: more samples, more epochs"
)
#: Steps of the run after it.
_AFTER_KILL = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of one launch."""

    combination: Combination
    exit_code: int
    wall_seconds: float  # from the command to its end
    measured: Measured | None = None  # `None` for a script without `lockstep.Run`
    identity: Mapping[str, object] = field(default_factory=dict)
    digest: str | None = None
    verdict: str = ""  # why the launch is no measurement


@dataclass(frozen=True, slots=True)
class Runner:
    """What is measured."""

    command: RunCommand
    threads: int  # of each rank, where neither the script nor a flag sets them
    gpus: Sequence[Gpu] = ()

    def run(self, combination: Combination, directory: Path) -> Trial:
        """Run the script; `directory` is new, and its parent exists."""
        exit_code, launched, wall = self._launch(combination, directory)
        trial = Trial(combination=combination, exit_code=exit_code, wall_seconds=wall)
        if exit_code:
            return replace(trial, verdict=verdict_in(directory / "errors.txt"))
        record = run_file.read(directory / "run")
        if record is None:
            return trial
        measured = measure(Recorded.of(directory / "run"), launched)
        verdict = "" if measured else _TOO_SHORT.format(record.get("steps", 0))
        known = {"identity": record.get("identity", {}), "digest": record.get("digest")}
        return replace(trial, measured=measured, verdict=verdict, **known)

    def restart(self, run: Measured, combination: Combination, directory: Path) -> float | None:
        """Run the script once more, kill a rank, and return the seconds until the run resumed."""
        kill = min(max(2, run.steps // 2), 2 + math.ceil(_BEFORE_KILL / run.step_seconds))
        faults = f"kill@{kill},term@{kill + _AFTER_KILL}"
        exit_code, _, _ = self._launch(combination, directory, {"LOCKSTEP_FAULTS": faults})
        recorded = run_file.read(directory / "run") if exit_code in (0, PREEMPTED) else None
        return None if recorded is None else restart_seconds(Recorded.of(directory / "run"))

    def _launch(
        self, combination: Combination, directory: Path, variables: Mapping[str, str] | None = None
    ) -> tuple[int, float, float]:
        """Return the exit code, the Unix time of the launch and its seconds."""
        directory.mkdir(parents=True)
        words = ["-n", str(combination.processes), "--run-dir", str(directory / "run")]
        words += self.command.words(combination.strategy, os.environ)
        words += [] if combination.exchange is None else ["--exchange", combination.exchange]
        environ = {"OMP_NUM_THREADS": str(self.threads)}  # without effect inside of a Run
        environ |= self.command.environ(combination.strategy, os.environ)
        environ |= combination.environ(self.gpus)
        environ |= {"LOCKSTEP_PROGRESS": "0", "LOCKSTEP_DEFAULT_THREADS": str(self.threads)}
        environ |= variables or {}
        launched, began = time.time(), time.monotonic()
        launcher = self.command.start(
            words, environ, directory / "output.txt", directory / "errors.txt"
        )
        try:
            exit_code = launcher.wait()
        finally:
            launcher.kill()  # its workers go with it
            launcher.wait()
        return exit_code, launched, time.monotonic() - began


def choose_threads(cores: int, ranks: Sequence[int]) -> int:
    """Return so many threads for each rank that the most ranks have them, too."""
    return max(1, cores // max(ranks))
