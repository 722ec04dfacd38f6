"""Running a script on one layout, in launches of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import PREEMPTED, UsageError
from lockstep.record import run_file
from lockstep.verify.layouts import WITH_SERVERS, Layout, Stage
from lockstep.verify.storm import Rage, draw
from lockstep.verify.traces import Traces, read

#: Restarts that `lockstep run` allows without being told.
_RESTARTS = 3
#: Variables that would change what a layout is.
_OURS = ("LOCKSTEP_FAULTS", "LOCKSTEP_FRESH", "LOCKSTEP_MAX_RESTARTS")
#: Variables that a strategy without servers would refuse.
_OF_SERVERS = ("LOCKSTEP_SERVERS", "LOCKSTEP_STALENESS")


@dataclass(frozen=True, slots=True)
class Work:
    """What every layout runs.

    Attributes:
        command: the script and its arguments.
        options: further options of `lockstep run`.
        of_servers: those that only a strategy with servers takes.
        replicas: number of replicas for scripts that name none.
    """

    command: Sequence[str]
    options: Sequence[str]
    of_servers: Sequence[str]
    replicas: int

    def words(self, layout: Layout, environ: Mapping[str, str]) -> list[str]:
        """Return the options of `lockstep run` on a layout; servers of which nobody says how many are 1."""
        if layout.strategy is None:
            return [*self.options, *self.of_servers]
        words = [*self.options, "--strategy", layout.strategy]
        if layout.strategy != WITH_SERVERS:
            return words
        is_said = "--servers" in self.of_servers or "LOCKSTEP_SERVERS" in environ
        return [*words, *self.of_servers, *(() if is_said else ("--servers", "1"))]

    def environ(self, layout: Layout, environ: Mapping[str, str]) -> dict[str, str]:
        """Return what a layout keeps of the environment: `PET_*` variables speak of another launch."""
        others = _OURS if layout.strategy in (None, WITH_SERVERS) else (*_OURS, *_OF_SERVERS)
        return {
            name: value
            for name, value in environ.items()
            if name not in others and not name.startswith("PET_")
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a script on one layout.

    Attributes:
        layout: the layout.
        exit_code: of the last launch.
        digest: of the weights at the end; `None` if it did not come to the end of a run.
        steps: how many updates.
        seconds: of all launches.
        kills: how many workers were killed.
        generations: how many sets of processes opened the run.
        traces: what every step saw and made.
        complaint: the last lines of the launch, where it failed.
    """

    layout: Layout
    exit_code: int
    digest: str | None
    steps: int
    seconds: float
    kills: int
    generations: int
    traces: Traces
    complaint: str


def run(layout: Layout, work: Work, directory: Path, steps: int) -> Outcome:
    """Run a script on `layout`.

    Args:
        layout: the layout.
        work: what to run.
        directory: a new directory for the run and its trace.
        steps: how many steps the run does without a fault, if that is known.

    Raises:
        UsageError: if the run is over before what was to happen to it.
    """
    directory.mkdir(parents=True)
    place = _Place(directory)
    kills = layout.kills
    started = time.monotonic()
    for stage in layout.stages:
        launcher = _start(layout, stage, work, place)
        try:
            if layout.storm is not None:
                strikes = draw(layout.storm.kills, layout.storm.seed, steps)
                kills = Rage(launcher, place.trace, steps).work(strikes)
            exit_code = launcher.wait()
        finally:
            launcher.kill()  # its workers go with it
            launcher.wait()
        if exit_code != (0 if stage.until is None else PREEMPTED):
            break
    seconds = time.monotonic() - started
    recorded = run_file.read(place.run) or {}
    outcome = Outcome(
        layout=layout,
        exit_code=exit_code,
        digest=recorded.get("digest"),
        steps=recorded.get("steps", 0),
        seconds=seconds,
        kills=kills,
        generations=len(recorded.get("generations", [])),
        traces=read(place.trace),
        complaint=_complaint(place.errors.read_text(errors="replace")) if exit_code else "",
    )
    _check_faults(outcome)
    return outcome


class _Place:
    """Where the launches of a layout leave what they do."""

    def __init__(self, directory: Path) -> None:
        self.run = directory / "run"
        self.trace = directory / "trace"
        self.output = directory / "output.txt"
        self.errors = directory / "errors.txt"


def _start(layout: Layout, stage: Stage, work: Work, place: _Place) -> subprocess.Popen[bytes]:
    words = ["run", "-n", str(stage.ranks), "--run-dir", str(place.run)]
    words += work.words(layout, os.environ)
    kills = len(stage.kills) if layout.storm is None else layout.storm.kills
    if kills > _RESTARTS:
        words += ["--max-restarts", str(kills)]
    environ = work.environ(layout, os.environ) | {
        "LOCKSTEP_TRACE": str(place.trace),
        "LOCKSTEP_PROGRESS": "0",
        "LOCKSTEP_DEFAULT_REPLICAS": str(work.replicas),
    }
    if stage.faults:
        environ["LOCKSTEP_FAULTS"] = ",".join(stage.faults)
    with place.output.open("ab") as output, place.errors.open("ab") as errors:
        return subprocess.Popen(
            [sys.executable, "-m", "lockstep", *words, *work.command],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=errors,
        )


def _check_faults(outcome: Outcome) -> None:
    """Refuse a layout in which something should have happened that did not.

    A fault that happens ends a generation, so that a run has one more of them than faults.
    """
    faults = [fault for stage in outcome.layout.stages for fault in stage.faults]
    if outcome.exit_code == 0 and outcome.digest is not None and outcome.generations <= len(faults):
        fault = faults[max(0, outcome.generations - 1)]
        kind, _, step = fault.partition("@")
        if kind == "kill" and int(step) <= outcome.steps:
            raise UsageError(
                f"{outcome.layout}: {fault} did not happen: the last rank makes no backward pass in step "
                f"{step} of {outcome.steps}",
                hint="name a step that calls run.backward",
            )
        raise UsageError(
            f"{outcome.layout}: the run was over before {fault} could happen; "
            f"it has {outcome.steps} steps",
            hint="name an earlier step",
        )


def _complaint(text: str) -> str:
    """The launcher's verdict is what its standard error ends with."""
    lines = text.rstrip().splitlines()
    marks = [i for i, line in enumerate(lines) if line.startswith("lockstep: ")]
    return "\n".join(lines[marks[-1] :] if marks else lines[-8:])


def directory_name(number: int, layout: Layout) -> str:
    """Return a name for the directory of the `number`-th layout that a shell takes as it is."""
    name = layout.name if layout.strategy is None else f"{layout.name}-{layout.strategy}"
    return f"{number}-{re.sub(r'[^0-9a-z]+', '-', name)}"
