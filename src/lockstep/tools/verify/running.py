"""Run a script on one layout, in one or more launches."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import PREEMPTED, AuditError, DivergenceError, RunError, UsageError
from lockstep.launch.command import RunCommand, errors_in, verdict_in
from lockstep.settings import TABLE
from lockstep.state.files import run_file
from lockstep.tools.verify.chaos import Chaos, draw
from lockstep.tools.verify.layouts import Layout, Stage
from lockstep.tools.verify.traces import Traces, read_runs

AUDIT = TABLE["audit"]
_WARNING = re.compile(r"lockstep: warning: (.*)")
#: Restarts that `lockstep run` allows by default.
_RESTARTS = 3


@dataclass(frozen=True, slots=True)
class RunSpec:
    """The script and its options for `lockstep run`, the same for every layout."""

    command: RunCommand
    replicas: int  # for scripts that do not set a number


@dataclass(frozen=True, slots=True)
class LayoutResult:
    """The result of a script on one layout: exit code, digest, steps, traces and others.

    Digest and steps are those of the first run in the script.
    """

    layout: Layout
    exit_code: int
    digest: str | None  # `None` if the run did not finish
    steps: int
    seconds: float
    kills: int  # number of workers that were killed
    generations: int  # number of (re)starts of the run
    traces: tuple[Traces, ...]  # of each run of the script
    complaint: str  # error message of the last launch, if it failed
    seed: int | None = None  # of the first run
    warnings: tuple[str, ...] = ()  # of the run about the script, each once

    @property
    def differs(self) -> bool:
        """Whether the run failed because bits differed between ranks or between repeated microbatches."""
        return any(f"{one.__name__}:" in self.complaint for one in (AuditError, DivergenceError))


def outcomes(layouts: Sequence[Layout], work: RunSpec, directory: Path) -> Iterable[LayoutResult]:
    """Run the script of `work` on every layout, in new directories below `directory`; yield the results.

    Raises:
        RunError: if the script fails on a layout for any reason but a difference that the run has found.
        UsageError: if the script makes no `lockstep.Run`.
    """
    steps = 0
    for number, layout in enumerate(layouts):
        if layout.random_kills is not None and not steps:
            raise UsageError(
                f"the script makes no steps on {layouts[0]}; expected some in which to kill ranks",
                hint="pass the optimizer through run.optimizer(…)",
            )
        outcome = run(layout, work, directory / directory_name(number, layout), steps)
        if outcome.exit_code and not outcome.differs:
            error = UsageError if outcome.exit_code == 2 else RunError
            raise error(f"the script fails on {layout}\n{outcome.complaint}")
        if outcome.digest is None and not outcome.differs:
            raise UsageError(
                "the script ends without a lockstep.Run; expected one to verify",
                hint="train inside `with lockstep.Run(…) as run:`; lockstep.integrations has adapters for "
                "Trainer, Accelerate and Lightning",
            )
        steps = steps or outcome.steps
        yield outcome


def run(layout: Layout, work: RunSpec, directory: Path, steps: int) -> LayoutResult:
    """Run the script of `work` on `layout` in the new directory `directory`; return the result.

    `steps` is the number of steps of a run without faults, for choosing random kills.

    Raises:
        UsageError: if the run ends before a requested fault.
    """
    directory.mkdir(parents=True)
    trace, recorded = directory / "trace", directory / "run"
    kills = sum(len(stage.kills) for stage in layout.stages)
    started = time.monotonic()
    for stage in layout.stages:
        with _started(layout, stage, work, directory) as launcher:
            if layout.random_kills is not None:
                moments = draw(layout.random_kills.kills, layout.random_kills.seed, steps)
                kills = Chaos(launcher, trace, steps).work(moments)
            exit_code = launcher.wait()
        if exit_code != (0 if stage.until is None else PREEMPTED):
            break
    seconds = time.monotonic() - started
    content = run_file.read(recorded) or {}
    outcome = LayoutResult(
        layout=layout,
        exit_code=exit_code,
        digest=content.get("digest"),
        steps=content.get("steps", 0),
        seconds=seconds,
        kills=kills,
        generations=len(content.get("generations", [])),
        traces=read_runs(trace),
        complaint=verdict_in(directory) if exit_code else "",
        seed=content.get("identity", {}).get("seed"),
        warnings=tuple(dict.fromkeys(_WARNING.findall(errors_in(directory)))),
    )
    _check_faults(outcome)
    return outcome


def _started(
    layout: Layout, stage: Stage, work: RunSpec, directory: Path
) -> AbstractContextManager[subprocess.Popen[bytes]]:
    words = ["-n", str(stage.ranks), "--run-dir", str(directory / "run")]
    words += work.command.words(layout.strategy, os.environ)
    kills = len(stage.kills) if layout.random_kills is None else layout.random_kills.kills
    if kills > _RESTARTS:
        words += ["--max-restarts", str(kills)]
    environ = work.command.environ(layout.strategy, os.environ) | {
        "LOCKSTEP_TRACE": str(directory / "trace"),
        "LOCKSTEP_PROGRESS": "0",
        "LOCKSTEP_DEFAULT_REPLICAS": str(work.replicas),
        # A script may have disabled its audit; here only the user of the command may do so.
        AUDIT.variable: os.environ.get(AUDIT.variable, str(AUDIT.default)),
    }
    if stage.faults:
        environ["LOCKSTEP_FAULTS"] = ",".join(stage.faults)
    return work.command.started(words, environ, directory)


def _check_faults(outcome: LayoutResult) -> None:
    """Raise `UsageError` if a kill or a preemption that the layout asks for did not happen.

    The run then has too few starts, since each one causes a restart.
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


def directory_name(number: int, layout: Layout) -> str:
    """Return a directory name for a layout and its index, without characters special to a shell."""
    name = layout.name if layout.strategy is None else f"{layout.name}-{layout.strategy}"
    return f"{number}-{re.sub(r'[^0-9a-z]+', '-', name)}"
