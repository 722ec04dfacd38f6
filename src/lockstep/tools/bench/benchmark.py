"""Launch a script several times on each combination of ranks, strategy and exchange; collect its times."""

from __future__ import annotations

import hashlib
import math
import os
import platform
import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

import psutil

from lockstep.errors import PREEMPTED, UsageError
from lockstep.launch.command import RunCommand, verdict_in
from lockstep.launch.devices.gpus import Gpu
from lockstep.state.files import run_file
from lockstep.state.record.reading import RunRecords
from lockstep.tools.bench.combinations import Combination, check_gpus, visible_gpus
from lockstep.tools.bench.comparing import FORMAT, RESULT, check_scripts, compare, load
from lockstep.tools.bench.measuring import Measurements, measure, restart_seconds
from lockstep.tools.bench.projecting import project
from lockstep.tools.bench.projection import Link
from lockstep.tools.bench.results import Row, Trial, add_speedups, row
from lockstep.tools.bench.traffic import Layout
from lockstep.version import __version__
from lockstep.world.cores import usable_cores
from lockstep.world.host import processor

Listener = Callable[[str], None]
Value = TypeVar("Value")
_TOO_SHORT = (
    "the run has {} steps, of which the first warms up; expected at least 2 of each rank\n"
    "hint: arguments for the script come after `--`: more samples, more epochs"
)
#: To measure a restart: the most seconds of training before a rank is killed, and the number of steps from
#: the kill to the end of the run.
_BEFORE_KILL, _AFTER_KILL = 3.0, 3


@dataclass(frozen=True, slots=True)
class Runner:
    """Launches the script of a benchmark, once for each call of `run` or `restart`."""

    command: RunCommand
    threads: int  # of each rank, if neither the script nor a flag sets a number
    gpus: Sequence[Gpu] = ()

    def run(self, combination: Combination, directory: Path) -> Trial:
        """Launch the script once; return its exit code, duration and measurements.

        The launch writes its output and its run directory to `directory`, which must not exist yet.
        """
        exit_code, launched, wall = self._launch(combination, directory)
        trial = Trial(combination=combination, exit_code=exit_code, wall_seconds=wall)
        if exit_code:
            return replace(trial, verdict=verdict_in(directory))
        record = run_file.read(directory / "run")
        if record is None:
            return trial
        measured = measure(RunRecords.of(directory / "run"), launched)
        verdict = "" if measured else _TOO_SHORT.format(record.get("steps", 0))
        known = {"identity": record.get("identity", {}), "digest": record.get("digest")}
        return replace(trial, measured=measured, verdict=verdict, **known)

    def restart(self, run: Measurements, combination: Combination, directory: Path) -> float | None:
        """Launch the script and kill a rank; return the seconds until the run resumed.

        Return `None` if the run did not resume. The step of the kill is chosen from `run`, the measurements
        of an earlier launch. The launch writes to `directory`, which must not exist yet.
        """
        kill = min(max(2, run.steps // 2), 2 + math.ceil(_BEFORE_KILL / run.step_seconds))
        faults = f"kill@{kill},term@{kill + _AFTER_KILL}"
        exit_code, _, _ = self._launch(combination, directory, {"LOCKSTEP_FAULTS": faults})
        recorded = run_file.read(directory / "run") if exit_code in (0, PREEMPTED) else None
        return None if recorded is None else restart_seconds(RunRecords.of(directory / "run"))

    def _launch(
        self, combination: Combination, directory: Path, variables: Mapping[str, str] | None = None
    ) -> tuple[int, float, float]:
        """Launch the script; return its exit code, its start as Unix time, and its duration in seconds.

        Output and run directory are written to `directory`, which must not exist yet. `variables` are
        further environment variables of the launch.
        """
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
        with self.command.started(words, environ, directory) as launcher:
            exit_code = launcher.wait()
        return exit_code, launched, time.monotonic() - began


@dataclass(slots=True)
class Launches:
    """Launches a script several times on each combination of ranks, strategy and exchange; keeps results.

    The directory of a run is removed after its records have been read, unless `keep`.
    """

    runner: Runner
    combinations: Sequence[Combination]
    directory: Path
    keep: bool
    say: Listener
    _trials: dict[Combination, list[Trial]] = field(default_factory=dict)
    _restarts: dict[Combination, float | None] = field(default_factory=dict)

    def run(self, rounds: int, *, restarts: bool) -> None:
        """Launch every combination `rounds` times; a combination that has failed is not launched again.

        With `restarts`, also measure for each combination how long a restart after a killed rank takes.

        Raises:
            UsageError: if strategies or exchanges are given and the script does not use Lockstep.
        """
        for number in range(1, rounds + 1):
            for combination in self._alive():
                trial = self._in(f"{number}", combination, self.runner.run)
                self._trials.setdefault(combination, []).append(trial)
                asked = combination.strategy or combination.exchange
                if asked and not trial.verdict and trial.measured is None:
                    raise UsageError(
                        f"{asked} was asked for, and the script makes no lockstep.Run; expected one",
                        hint="without --strategies and --exchanges the wall time of the script is measured",
                    )
                self.say(f"round {number} of {rounds}: {combination}: {_described(trial)}")
        for combination in self._alive() if restarts else ():
            measured = self._trials[combination][-1].measured
            if measured is not None:
                restart = partial(self.runner.restart, measured)
                seconds = self._restarts[combination] = self._in("restart", combination, restart)
                took = "the run did not resume" if seconds is None else f"{seconds:.2f} s"
                self.say(f"restart after a kill: {combination}: {took}")

    def _alive(self) -> list[Combination]:
        return [
            one
            for one in self.combinations
            if not any(trial.verdict for trial in self._trials.get(one, ()))
        ]

    def _in(
        self, name: str, combination: Combination, launch: Callable[[Combination, Path], Value]
    ) -> Value:
        layout = re.sub(r"[^0-9a-z]+", "-", str(combination))
        directory = self.directory / f"{layout}.{name}"
        try:
            return launch(combination, directory)
        finally:
            if not self.keep:
                shutil.rmtree(directory, ignore_errors=True)

    def rows(self, cores: int) -> list[Row]:
        """Return a row of results for each combination of ranks, strategy and exchange.

        `cores` is the number of cores of this machine.
        """
        rows = [
            row(one, self._trials.get(one, ()), self._restarts.get(one), cores)
            for one in self.combinations
        ]
        add_speedups(rows)
        return rows


def _described(trial: Trial) -> str:
    if trial.verdict and not trial.exit_code:
        return trial.verdict.partition("\n")[0]
    if trial.verdict:
        return f"failed, exit code {trial.exit_code}"
    if trial.measured is None:
        return f"{trial.wall_seconds:.1f} s, no lockstep.Run: measured by wall time"
    run = trial.measured
    return f"{run.batch / run.step_seconds:,.1f} samples/s, {trial.wall_seconds:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmark:
    """Options of one call of `lockstep bench`; `run` launches the script and returns the results."""

    command: RunCommand
    combinations: Sequence[Combination]
    repeat: int  # number of launches of each combination
    restarts: bool  # whether to measure a restart of each combination
    wanted: Sequence[Layout]  # layouts to project to
    link: Link
    other: str | None  # name of the results to compare with

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise UsageError(f"--repeat is {self.repeat}; expected at least 1")
        check_gpus(self.combinations, visible_gpus())
        if self.other is not None:  # before anything runs
            check_scripts(self._script(), load(self.other), self.other)

    def _script(self) -> dict[str, Any]:
        path, *arguments = self.command.script
        return {
            "name": Path(path).name,
            "arguments": arguments,
            "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest(),
        }

    def run(self, directory: Path, say: Listener, *, keep: bool) -> dict[str, Any]:
        """Launch the script with each of `combinations`; return the content of the JSON results file.

        Each launch writes its output and its run directory below `directory`; both are removed unless
        `keep`. `say` is called with one line of progress after each launch.
        """
        machine = describe_machine()
        threads = max(1, machine["cores"] // max(one.ranks for one in self.combinations))
        work = Runner(self.command, threads, visible_gpus())
        launches = Launches(work, self.combinations, directory, keep, say)
        launches.run(self.repeat, restarts=self.restarts)
        rows = launches.rows(machine["cores"])
        content: dict[str, Any] = {
            "format": FORMAT,
            "kind": RESULT,
            "script": self._script(),
            "machine": machine,
            "options": [*self.command.options, *self.command.of_servers],
            "results": rows,
        }
        if self.wanted:
            content |= project(rows, self.wanted, self.link).content()
        return content

    def compare(self, content: dict[str, Any]) -> None:
        """Add the comparison with the results that `--compare` names, if any, to the results `content`.

        Raises:
            UsageError: if the two results cannot be compared.
        """
        if self.other is not None:
            content["comparison"] = compare(content, load(self.other), self.other)


def describe_machine() -> dict[str, Any]:
    """Return this machine's processor, cores and memory, and the versions of Python, torch and Lockstep."""
    return {
        "processor": processor(),
        "cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "versions": {
            "python": platform.python_version(),
            "torch": metadata.version("torch"),
            "lockstep": __version__,
        },
    }
