"""Unfinished runs of a script: what the next start of the same command can continue."""

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
from lockstep.state.files.lock import Owner

#: Where runs without a given directory are.
BASE = Path("runs")


@dataclass(frozen=True, slots=True)
class Unfinished:
    """A run that has not finished, has a checkpoint, and is not in use.

    Attributes:
        directory: the run directory.
        step: of its newest checkpoint.
        began: when its newest processes started, in Unix seconds.
    """

    directory: Path
    step: int
    began: float


def find(
    directories: Iterable[Path], meant: Mapping[str, Any], owner: Owner | None = None
) -> list[Unfinished]:
    """Return the unfinished runs among `directories`, the newest first.

    Args:
        directories: run directories; others are passed over.
        meant: what the identity of the run has to have; `None` allows any value.
        owner: of this launch, whose own lock does not count.
    """
    found = []
    for directory in directories:
        with contextlib.suppress(LockstepError):  # it cannot be read, so it cannot be continued
            one = _look(directory, meant, owner)
            found += [] if one is None else [one]
    return sorted(found, key=lambda one: one.began, reverse=True)


def require(found: list[Unfinished], what: str, where: Path, *, resume: str, run_dir: str) -> Path:
    """Return the directory of the newest run of `found`.

    Args:
        found: unfinished runs.
        what: the script and its arguments.
        where: the directory that was searched.
        resume: the flag or the variable that asks for one.
        run_dir: how a user names a directory; the directory follows.

    Raises:
        UsageError: if there is none.
    """
    if not found:
        raise UsageError(
            f"{resume}: there is no unfinished run of {what} in {where}; expected one with a checkpoint, "
            "which no launch uses",
            hint=f"without {resume} a new run begins; {run_dir}DIR continues the run in DIR",
        )
    return found[0].directory


def contradicting(resume: str, fresh: str) -> UsageError:
    """Return the error for a run that is to continue and to begin anew."""
    return UsageError(
        f"{resume} and {fresh} contradict each other; expected one of them",
        hint=f"{resume} continues an unfinished run, {fresh} begins anew",
    )


def note(found: list[Unfinished], *, resume: str, run_dir: str) -> str:
    """Return the line that names the newest run of `found`, for a command that begins a new one.

    Args:
        found: unfinished runs, at least one.
        resume: how a user asks for the newest.
        run_dir: how a user names a directory; the directory follows.
    """
    place, older = short(found[0].directory), len(found) - 1
    more = f" (and {older} older)" if older else ""
    return (
        f"lockstep: unfinished run {place} at step {found[0].step}{more}: "
        f"continue it with {resume} or {run_dir}{place}"
    )


def is_same(identity: Mapping[str, Any], meant: Mapping[str, Any]) -> bool:
    """Return whether a recorded identity has all values that are `meant`, as far as these say any."""
    return all(value is None or identity.get(name) == value for name, value in meant.items())


def _look(directory: Path, meant: Mapping[str, Any], owner: Owner | None) -> Unfinished | None:
    # In this order: a run records its end before it gives its lock back.
    used = lock.in_use(directory, owner)
    recorded = run_file.read(directory)
    if recorded is None or used or not is_same(recorded.get("identity", {}), meant):
        return None
    if recorded.get("status") == "finished" and not run_file.continues(directory, recorded):
        return None
    steps = [step for step, _ in catalog.paths(directory / catalog.DIRECTORY)]
    began = recorded.get("generations", [{}])[-1].get("time", 0.0)
    return Unfinished(directory, steps[0], began) if steps else None
