"""Checkpoints of a directory: listing, verification by checksums, deletion of old ones.

Does not import torch.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import isnan
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError, RunDirectoryError
from lockstep.state.checkpoint import manifest
from lockstep.state.checkpoint.manifest import Manifest

#: Where in a run directory checkpoints are.
DIRECTORY = "checkpoints"
#: What is being written or removed has a name that begins so, which no checkpoint has.
DRAFT = ".draft-"
#: How the names of checkpoints begin that are being removed.
REMOVED = f"{DRAFT}removed-"
_PATTERN = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
#: Which checkpoint it is: its step, and how many states of that step were saved before.
Key = tuple[int, int]

Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint whose files are what was written.

    Attributes:
        path: its directory.
        manifest: what it holds.
    """

    path: Path
    manifest: Manifest


def place(directory: Path, key: Key) -> Path:
    """Return where a checkpoint is."""
    step, number = key
    return directory / (f"step-{step:08d}.{number}" if number else f"step-{step:08d}")


def key_of(path: Path) -> Key | None:
    """Return which checkpoint is at `path`; `None` where that is none's place."""
    match = _PATTERN.fullmatch(path.name)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def paths(directory: Path) -> dict[Key, Path]:
    """Return where checkpoints are, whole or not: the newest first.

    Raises:
        CheckpointError: if the directory cannot be read.
    """
    try:
        names = [entry.name for entry in directory.iterdir()]
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CheckpointError(
            f"the checkpoints in {directory} cannot be read: {error.strerror or error}",
            hint="--run-dir names another place",
        ) from error
    found = {key: directory / name for name in names if (key := key_of(Path(name)))}
    return dict(sorted(found.items(), reverse=True))


def look(path: Path) -> Found:
    """Return the checkpoint at `path`, once all of its files have been compared with its manifest.

    Raises:
        CheckpointError: saying what is wrong with it.
    """
    try:
        found = Found(path, manifest.read(path))
        found.manifest.verify(path)
    except OSError as error:
        raise CheckpointError(f"it cannot be read: {error.strerror or error}") from error
    return found


def newest(directory: Path, identity: Mapping[str, Any] | None, warn: Warn) -> Found | None:
    """Return the newest checkpoint that verifies, or `None` where none does.

    Args:
        directory: where checkpoints are.
        identity: of the run that will continue from it; `None` takes any.
        warn: told of each checkpoint that is skipped.

    Raises:
        RunDirectoryError: if the checkpoint is of another run; naming both values.
        CheckpointError: if the directory cannot be read.
    """
    there = paths(directory)
    for path in there.values():
        try:
            if identity is not None:
                check_identity(path, identity)
            return look(path)
        except CheckpointError as error:
            hint = f"; {error.hint}" if error.hint else ""
            warn(f"lockstep: warning: the checkpoint {path} is skipped: {error.message}{hint}")
    if there:
        warn(f"lockstep: warning: no checkpoint of the {len(there)} in {directory} can be used")
    return None


def best(directory: Path) -> Path | None:
    """Return where the best checkpoint is, by what the manifests say; `None` if none says it.

    Raises:
        CheckpointError: if the directory cannot be read.
    """
    rated: list[tuple[float, Key]] = []
    for key, path in paths(directory).items():
        # One that cannot be read is not the best.
        with contextlib.suppress(OSError, CheckpointError):
            value = manifest.read(path).best
            if value is not None:
                rated.append((value, key))
    return place(directory, max(rated)[1]) if rated else None


def check_identity(path: Path, identity: Mapping[str, Any]) -> None:
    """Refuse a checkpoint of another run.

    Raises:
        RunDirectoryError: naming what differs.
        CheckpointError: if its manifest cannot be read.
    """
    try:
        differences = manifest.read(path).differences(identity)
    except OSError as error:
        raise CheckpointError(f"it cannot be read: {error.strerror or error}") from error
    if differences:
        raise RunDirectoryError(
            f"the checkpoint {path} is of another run: " + "; ".join(differences),
            hint="--fresh begins anew there, --run-dir names another directory",
        )


def superseded(good: Mapping[Key, float | None], keep: int, newest: Key) -> set[Key]:
    """Return which checkpoints are no longer needed.

    Args:
        good: how good each whole checkpoint is.
        keep: how many of the latest stay.
        newest: the one that was written just now: it stays in any case.
    """
    stay = {newest, *sorted(good)[-keep:]}
    rated = [(best, key) for key, best in good.items() if best is not None and not isnan(best)]
    if rated:
        stay.add(max(rated)[1])
    return set(good) - stay


def remove_old(
    directory: Path, identity: Mapping[str, Any], *, keep: int, newest: Key, bad: Collection[Key]
) -> None:
    """Remove what is no longer needed, once the checkpoint `newest` is on disk.

    Checkpoints of other runs and of newer formats are not removed, and damaged ones stand in for
    none of those that stay.

    Args:
        directory: where checkpoints are.
        identity: of the run.
        keep: how many of the latest stay.
        newest: the one that was written just now.
        bad: those that were found damaged.
    """
    good: dict[Key, float | None] = {}
    damaged: set[Key] = set()
    for key, path in paths(directory).items():
        try:
            told = manifest.read(path)
            if told.differences(identity):
                continue
            for name in told.files:
                told.verify_size(path, name)
        except manifest.NewerFormatError:
            continue
        except manifest.DamagedError:
            damaged.add(key)
            continue
        except (OSError, CheckpointError):
            continue
        if key in bad:
            damaged.add(key)
        else:
            good[key] = told.best
    # A damaged one that lies ahead is replaced when the run gets there.
    older = {key for key in damaged if key < newest}
    for key in superseded(good, keep, newest) | older:
        remove(place(directory, key))


def remove(path: Path) -> None:
    """Remove a checkpoint: a half removed one has no checkpoint's name."""
    aside = path.with_name(f"{REMOVED}{path.name}")
    with contextlib.suppress(OSError):
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
