"""List the checkpoints in a directory, verify them by checksums, and remove old ones.

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

#: Name of the directory of checkpoints in a run directory.
DIRECTORY = "checkpoints"
#: Begins the names of directories that are being written or removed; no checkpoint's name begins so.
DRAFT = ".draft-"
#: Begins the names of checkpoints that are being removed.
REMOVED = f"{DRAFT}removed-"
_PATTERN = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
#: Identifies a checkpoint: its step, and the number of states of that step that were saved before.
Key = tuple[int, int]

Warn = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint on disk whose files match the checksums of its manifest."""

    path: Path
    manifest: Manifest


def place(directory: Path, key: Key) -> Path:
    """Return the path of the checkpoint of a step and number (`key`) in `directory`."""
    step, number = key
    return directory / (f"step-{step:08d}.{number}" if number else f"step-{step:08d}")


def key_of(path: Path) -> Key | None:
    """Return the step and number in the name of a checkpoint's path; `None` for any other name."""
    match = _PATTERN.fullmatch(path.name)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def paths(directory: Path) -> dict[Key, Path]:
    """Return the paths of all checkpoints in a directory by key, damaged ones too, the newest first.

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


def look(path: Path, identity: Mapping[str, Any] | None = None) -> Found:
    """Return the checkpoint at `path` after comparing its files with the sizes and checksums recorded.

    Raises:
        RunDirectoryError: if the checkpoint is of another run than `identity`; naming each difference.
        CheckpointError: if the checkpoint is damaged or cannot be read.
    """
    try:
        found = Found(path, manifest.read(path))
        differences = [] if identity is None else found.manifest.differences(identity)
        if not differences:
            found.manifest.verify(path)
    except OSError as error:
        raise CheckpointError(f"it cannot be read: {error.strerror or error}") from error
    if differences:
        raise RunDirectoryError(
            f"the checkpoint {path} is of another run: " + "; ".join(differences),
            hint="--fresh begins anew there, --run-dir names another directory",
        )
    return found


def newest(directory: Path, identity: Mapping[str, Any] | None, warn: Warn) -> Found | None:
    """Return the newest checkpoint that verifies, or `None` if none does.

    With `identity`, a checkpoint of another run is an error; without it, any checkpoint is taken. `warn` is
    called with a message for each checkpoint that is skipped.

    Raises:
        RunDirectoryError: if the checkpoint is of another run; naming both values.
        CheckpointError: if the directory cannot be read.
    """
    there = paths(directory)
    for path in there.values():
        try:
            return look(path, identity)
        except CheckpointError as error:
            hint = f"; {error.hint}" if error.hint else ""
            warn(f"lockstep: warning: the checkpoint {path} is skipped: {error.message}{hint}")
    if there:
        warn(f"lockstep: warning: no checkpoint of the {len(there)} in {directory} can be used")
    return None


def best(directory: Path) -> Path | None:
    """Return the path of the checkpoint with the best rating; `None` if no checkpoint has a rating.

    Raises:
        CheckpointError: if the directory cannot be read.
    """
    rated: list[tuple[float, Key]] = []
    for key, path in paths(directory).items():
        # A checkpoint that cannot be read is not the best.
        with contextlib.suppress(OSError, CheckpointError):
            if (value := manifest.read(path).best) is not None:
                rated.append((value, key))
    return place(directory, max(rated)[1]) if rated else None


def remove_old(
    directory: Path, identity: Mapping[str, Any], *, keep: int, newest: Key, bad: Collection[Key]
) -> None:
    """Remove old checkpoints, except the `keep` latest ones, the best one, and the one with key `newest`.

    Checkpoints of other runs and of newer formats stay. Damaged ones, among them those with keys in `bad`,
    do not count among the `keep` latest, and are removed if they are older than `newest`.
    """
    good: dict[Key, float | None] = {}
    damaged: set[Key] = set()
    for key, path in paths(directory).items():
        try:
            content = manifest.read(path)
            if content.differences(identity):
                continue
            for name in content.files:
                content.verify_size(path, name)
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
            good[key] = content.best
    stay = {newest, *sorted(good)[-keep:]}
    rated = [(best, key) for key, best in good.items() if best is not None and not isnan(best)]
    if rated:
        stay.add(max(rated)[1])
    # A damaged checkpoint of a later step is replaced when the run reaches that step.
    older = {key for key in damaged if key < newest}
    for key in (good.keys() - stay) | older:
        remove(place(directory, key))


def remove(path: Path) -> None:
    """Remove a checkpoint after renaming it: a kill cannot leave an incomplete one under its name."""
    aside = path.with_name(f"{REMOVED}{path.name}")
    with contextlib.suppress(OSError):
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
