"""Replay steps of a recorded run: start the script from an earlier state, in a scratch directory."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import RunError, UsageError
from lockstep.launch.command import verdict_in
from lockstep.state.checkpoint import catalog
from lockstep.state.files import run_file
from lockstep.state.record import steps
from lockstep.state.record.steps import Entry, Key
from lockstep.tools.replay.recorded import RecordedRun

#: Settings of every replay: hashes of all steps, and no other output of the run.
_SETTINGS = {
    "LOCKSTEP_HASH_EVERY": "1",  # the recorded steps, which followed from times, are among them
    "LOCKSTEP_PROGRESS": "0",
    "LOCKSTEP_CHECKPOINT_EVERY": "0",
    "LOCKSTEP_ANCHORS": "0",
    "LOCKSTEP_AUDIT": "off",
    "LOCKSTEP_LOGGERS": "",
}


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """Options of `lockstep replay`: which steps to compute again, and which results to show or save."""

    step: int  # the first step of interest, counted from 1
    until: int  # the last one
    replica: int | None = None  # of which results are shown; `None` for all
    debugs: bool = False  # whether to stop in the debugger
    anomaly: bool = False  # whether to switch on torch's anomaly detection
    saves: bool = False  # whether to save the state after the last step
    traces: int | None = None  # step of which each module's output is hashed
    ranks: int = 1
    devices: str | None = None

    @property
    def is_shown(self) -> bool:
        """Whether the replayed script's output goes to the terminal, as for a debugger."""
        return self.debugs or self.anomaly

    def check(self, run: RecordedRun) -> None:
        """Raise `UsageError` unless the run has the steps and the replica in these options.

        The run also needs a record of the steps, unless the script's output is shown.
        """
        replicas = run.identity.get("replicas", 1)
        if not 1 <= self.step <= self.until:
            raise UsageError(
                f"--step {self.step} --until {self.until}; expected 1 <= step <= until",
                hint="steps are counted from 1; --until is the last step to compute",
            )
        if self.replica is not None and not 0 <= self.replica < replicas:
            raise UsageError(
                f"--replica is {self.replica}; expected 0 to {replicas - 1}, the replicas of the run"
            )
        if self.until > run.last:
            raise UsageError(
                f"step {self.until} was never reached: the run has recorded {run.last} steps",
                hint="a run that is still training records more later",
            )
        if not self.is_shown and not any(
            self.step <= key.step <= self.until for key in run.entries
        ):
            raise UsageError(
                f"{run.directory} has no record of steps {self.step} to {self.until}; expected losses and "
                "hashes to compare with",
                hint="--hash-every 0 records none, and very old steps are removed; --pdb needs none",
            )


@dataclass(frozen=True, slots=True)
class ReplayResults:
    """Results of the steps that a replay has computed again: losses, hashes, and sample ids."""

    begin: int  # the step after which it began
    content: dict[str, Any]  # its `run.json`
    entries: dict[Key, Entry]  # its step record
    samples: dict[tuple[int, int], list[int]]  # sample ids by step and replica
    trace: list[dict[str, Any]]  # what `TracedStep` has written


def replay(run: RecordedRun, asked: ReplayOptions, directory: Path) -> ReplayResults:
    """Compute the steps in `asked` of a recorded run again; return the results.

    The script runs in a new run directory below `directory`; the recorded run is not changed. The options
    in `asked` are not checked here: call `asked.check` before.

    Raises:
        RunError: if the script fails.
    """
    directory.mkdir(parents=True, exist_ok=True)
    state = run.state_at(0, asked.step - 1)
    scratch = directory / "run"
    run.begin(state, scratch, stays=False)
    words = ["-n", str(asked.ranks), "--run-dir", str(scratch), "--max-restarts", "0"]
    devices = asked.devices or ("cpu" if run.identity.get("device") == "cpu" else None)
    command = run.command([] if devices is None else ["--devices", devices])
    request = {
        "step": asked.step,
        "until": asked.until,
        "directory": str(directory),
        "debugs": (asked.replica or 0) if asked.debugs else None,
        "anomaly": asked.anomaly,
        "saves": asked.saves,
        "traces": asked.traces,
    }
    environ = command.environ(run.strategy, os.environ) | run.variables() | _SETTINGS
    environ |= {"LOCKSTEP_REPLAY": json.dumps(request)}
    words = [*words, *command.words(run.strategy, os.environ)]
    if asked.is_shown:
        code = subprocess.call(command.program(words), env=environ, cwd=run.working_directory)
        complaint = f"exit code {code}"
    else:
        with command.started(words, environ, directory, run.working_directory) as launcher:
            code = launcher.wait()
        complaint = verdict_in(directory)
    if code:
        raise RunError(f"the script fails in the replay of {run.directory}\n{complaint}")
    key = None if state is None else catalog.key_of(state)
    return ReplayResults(
        begin=0 if key is None else key[0],
        content=run_file.read(scratch) or {},
        entries=steps.read(scratch),
        samples={(e["step"], e["replica"]): e["samples"] for e in _lines(directory, "samples")},
        trace=list(_lines(directory, "trace")),
    )


def _lines(directory: Path, name: str) -> Iterator[dict[str, Any]]:
    for path in directory.glob(f"{name}-*.jsonl"):
        yield from map(json.loads, path.read_text(encoding="utf-8").splitlines())
