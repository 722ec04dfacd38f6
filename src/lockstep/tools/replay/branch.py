"""`lockstep branch`: start a new run from a state of a recorded run, with different settings."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.errors import CheckFailedError, UsageError
from lockstep.launch.output import say
from lockstep.state.files import directory as directories
from lockstep.state.files import run_file
from lockstep.tools.replay.comparison import Comparison
from lockstep.tools.replay.recorded import RecordedRun
from lockstep.tools.replay.replaying import ReplayOptions, replay


def branch(
    run: RecordedRun,
    step: int,
    words: Sequence[str],
    arguments: list[str] | None,
    *,
    given: Mapping[str, object],
    run_dir: Path | None,
    scratch: Path,
) -> int:
    """Start a run that begins with the state after step `step` of `run`; return its exit code.

    Without a checkpoint of that step, the steps up to there are computed again first.

    Args:
        run: the parent.
        step: number of the step.
        words: options of `lockstep run`.
        arguments: arguments of the script; `None` for the recorded ones.
        given: the settings that `words` give.
        run_dir: directory of the new run; by default a new one in `runs/`.
        scratch: an empty directory for the replay.

    Raises:
        UsageError: if the run has no such step, or `run_dir` has a run.
        CheckFailedError: if the replay up to the step differs from the record.
    """
    target = directories.name_new(str(run.identity.get("name"))) if run_dir is None else run_dir
    if run_file.read(target) is not None:
        raise UsageError(
            f"{target} has a run; expected a new directory", hint="name another one with --run-dir"
        )
    state, source = run.state_at(step, step), run
    if state is None:
        source, state = _computed(run, step, scratch)
        how = "computed again, since there is no checkpoint of it"
    else:
        how = f"from {directories.short(state)}"
    say(f"lockstep: a branch of {run.directory} after step {step}, {how}")
    source.begin(state, target.absolute(), stays=True)
    content = run_file.read(target) or {}
    content["parent"] |= {"directory": str(run.directory)}
    run_file.write(target, content)
    command = run.command([], arguments)
    environ = command.environ(None, os.environ) | run.variables(*given)
    strategy = [] if run.strategy is None or "strategy" in given else ["--strategy", run.strategy]
    program = command.program([*strategy, "--run-dir", str(target.absolute()), *words])
    return subprocess.call(program, env=environ, cwd=run.working_directory)


def _computed(run: RecordedRun, step: int, scratch: Path) -> tuple[RecordedRun, Path]:
    """Compute the steps of a run up to `step` again; return the replay, and its checkpoint of that step.

    `scratch` is an empty directory for the replay. `CheckFailedError` is raised if the replay differs from
    the record.
    """
    asked = ReplayOptions(step=step, until=step, saves=True)
    asked.check(run)
    result = Comparison(run, asked, replay(run, asked, scratch))
    if not result.same:
        what = result.difference or f"nothing is recorded of step {step}"
        raise CheckFailedError(
            f"the state after step {step} cannot be computed again: {what}",
            hint="name a step of which there is a checkpoint",
        )
    replayed = RecordedRun.of(scratch / "run")
    state = replayed.state_at(step, step)
    if state is None:
        raise UsageError(
            f"after step {step} the state is not complete; expected the end of a batch",
            hint="with several optimizer steps per batch, or local-sgd, name another step",
        )
    return replayed, state
