"""Find the unfinished runs of a script, any of which the same command can resume."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import LockstepError, UsageError
from lockstep.state.checkpoint import catalog
from lockstep.state.files import lock, run_file
from lockstep.state.files.directory import short
from lockstep.state.files.lock import LockOwner

#: Settings of a run that a command must not change to resume it.
FIXED = ("seed", "replicas", "threads", "precision")
#: Directory of all runs that are started without a given run directory.
BASE = Path("runs")


@dataclass(frozen=True, slots=True)
class UnfinishedRun:
    """An unfinished run that can be resumed: it has a checkpoint, and no launch uses its directory."""

    directory: Path
    step: int  # of the newest checkpoint
    began: float  # time of the last (re)start, in Unix seconds


def find(
    directories: Iterable[Path], meant: Mapping[str, Any], owner: LockOwner | None = None
) -> list[UnfinishedRun]:
    """Return the unfinished runs among `directories`, the newest first.

    Args:
        directories: run directories; those that cannot be read are skipped, and those that another
            launch has locked.
        meant: fields that the run's identity must have, such as script, arguments and seed; `None`
            allows any value.
        owner: owner of this launch's lock; a directory that it has locked is not skipped.
    """
    found = []
    for directory in directories:
        with contextlib.suppress(LockstepError):  # it cannot be read, so it cannot be continued
            if (run := _look(directory, meant, owner)) is not None:
                found.append(run)
    return sorted(found, key=lambda run: run.began, reverse=True)


def require(
    found: list[UnfinishedRun], what: str, where: Path, *, resume: str, run_dir: str
) -> Path:
    """Return the directory of the first run of `found`, which is the newest.

    Args:
        found: unfinished runs, the newest first, as `find` returns them.
        what: script and arguments, for the error message, as all further arguments.
        where: directory in which the runs were searched.
        resume: flag or variable that resumes an unfinished run, such as `--resume`.
        run_dir: text before a directory that sets the run directory, such as `LOCKSTEP_RUN_DIR=`.

    Raises:
        UsageError: if `found` is empty.
    """
    if not found:
        raise UsageError(
            f"{resume}: there is no unfinished run of {what} in {where}; expected one with a checkpoint, "
            "which no launch uses",
            hint=f"without {resume} a new run begins; {run_dir}DIR continues the run in DIR; a run writes "
            "its first checkpoint after 600 s, unless --checkpoint-every or run.save says otherwise",
        )
    return found[0].directory


def contradicting(resume: str, fresh: str) -> UsageError:
    """Return the error for a command that both resumes a run and begins a new one.

    `resume` and `fresh` are the names of the two flags or variables.
    """
    return UsageError(
        f"{resume} and {fresh} contradict each other; expected one of them",
        hint=f"{resume} continues an unfinished run, {fresh} begins anew",
    )


def note(found: list[UnfinishedRun], *, resume: str, run_dir: str) -> str:
    """Return a message that the newest run of `found` can be resumed, and by which flags.

    `resume` is the flag or variable that resumes an unfinished run, such as `--resume`. `run_dir` is the
    flag or variable that sets the run directory, up to the directory: `LOCKSTEP_RUN_DIR=`.
    """
    place, older = short(found[0].directory), len(found) - 1
    more = f" (and {older} older)" if older else ""
    return (
        f"lockstep: unfinished run {place} at step {found[0].step}{more}: "
        f"continue it with {resume} or {run_dir}{place}"
    )


def is_same(identity: Mapping[str, Any], meant: Mapping[str, Any]) -> bool:
    """Return whether a run's `identity` has the values in `meant`; `None` in `meant` allows any."""
    return all(value is None or identity.get(name) == value for name, value in meant.items())


def _look(
    directory: Path, meant: Mapping[str, Any], owner: LockOwner | None
) -> UnfinishedRun | None:
    # In this order: a run records its end before it releases its lock.
    used = lock.in_use(directory, owner)
    recorded = run_file.read(directory)
    if recorded is None or used or not is_same(recorded.get("identity", {}), meant):
        return None
    if recorded.get("status") == "finished" and not run_file.continues(directory, recorded):
        return None
    steps = [step for step, _ in catalog.paths(directory / catalog.DIRECTORY)]
    began = recorded.get("generations", [{}])[-1].get("time", 0.0)
    return UnfinishedRun(directory, steps[0], began) if steps else None
