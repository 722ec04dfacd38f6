"""`Catalog`: checkpoints of a directory: listing, verification by checksums, deletion of old ones.

Does not import torch.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
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


def warn_on_stderr(message: str) -> None:
    """Write a warning to standard error."""
    sys.stderr.write(f"{message}\n")


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


def remove(path: Path) -> None:
    """Rename a checkpoint, then remove it: so a kill leaves no incomplete checkpoint under its name."""
    aside = path.with_name(f"{REMOVED}{path.name}")
    with contextlib.suppress(OSError):
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


class Catalog:
    """The checkpoints of one run in a directory, which is made with the first checkpoint.

    Args:
        directory: contains one directory per checkpoint.
        identity: of the run, as JSON values; a checkpoint of another run is an error.
        warn: called with a message for each checkpoint that is skipped.
    """

    def __init__(
        self, directory: Path, identity: Mapping[str, Any], warn: Warn = warn_on_stderr
    ) -> None:
        self.directory, self.warn = directory, warn
        self.identity = json.loads(json.dumps(identity))
        #: Checkpoints newer than the one that the run resumed from: their files did not verify.
        self._damaged: set[Key] = set()

    def newest(self) -> Found | None:
        """Return the newest checkpoint whose files verify; `None` if there is none.

        Damaged, half removed and newer-format checkpoints are skipped, with a warning.

        Raises:
            RunDirectoryError: if the checkpoint is of another run.
            CheckpointError: if the directory cannot be read.
        """
        found = newest(self.directory, self.identity, self.warn)
        last = None if found is None else key_of(found.path)
        self._damaged = {key for key in paths(self.directory) if last is None or key > last}
        return found

    def newest_text(self) -> str | None:
        """Return the newest readable manifest's text (the state without tensors); no checksum is verified.

        Raises:
            CheckpointError: if the directory cannot be read.
        """
        for path in paths(self.directory).values():
            with contextlib.suppress(CheckpointError, OSError):
                return manifest.read(path).text
        return None

    def remove_old(self, keep: int, newest: Key) -> None:
        """Remove checkpoints of this run, except the `keep` latest, the best, and that with key `newest`.

        Checkpoints of newer formats stay. Damaged ones do not count towards `keep`, and are removed if
        older than `newest`.

        Raises:
            CheckpointError: if the directory cannot be read.
        """
        self._damaged.discard(newest)
        good: dict[Key, float | None] = {}
        damaged: set[Key] = set()
        for key, path in paths(self.directory).items():
            try:
                content = manifest.read(path)
                if content.differences(self.identity):
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
            if key in self._damaged:
                damaged.add(key)
            else:
                good[key] = content.best
        stay = {newest, *sorted(good)[-keep:]}
        rated = [(best, key) for key, best in good.items() if best is not None and not isnan(best)]
        if rated:
            stay.add(max(rated)[1])
        # A damaged one that lies ahead is replaced when the run gets there.
        older = {key for key in damaged if key < newest}
        for key in (good.keys() - stay) | older:
            remove(place(self.directory, key))
