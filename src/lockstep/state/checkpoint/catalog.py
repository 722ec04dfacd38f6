"""`Catalog`: list, verify and delete the checkpoints in a directory; read and write their manifests.

A manifest, `manifest.json`, contains the run's identity and step, dtype and shape of each tensor, and size
and checksum of each file. This module does not import torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError, RunDirectoryError
from lockstep.state.files.atomic_file import atomic_write
from lockstep.version import __version__

#: Name of the directory of checkpoints in a run directory.
DIRECTORY = "checkpoints"
#: Begins the names of directories that are being written or removed; no checkpoint's name begins so.
DRAFT = ".draft-"
#: Begins the names of checkpoints that are being removed.
REMOVED = f"{DRAFT}removed-"
_PATTERN = re.compile(r"step-(\d{8,})(?:\.(\d+))?")
#: Identifies a checkpoint: its step, and the number of other states that were saved earlier at that step.
Key = tuple[int, int]

Warn = Callable[[str], None]
MANIFEST = "manifest.json"
#: Format of the file; it grows with each change that an older version of Lockstep could not read.
FORMAT = 2
#: Permissions of a checkpoint's files and directories: only the user may read the state.
FILE_MODE, DIRECTORY_MODE = 0o600, 0o700

_RATING = (float, int, type(None))
_KINDS: dict[str, tuple[type, ...]] = {
    "identity": (dict,),
    "step": (int,),
    "best": _RATING,
    "text": (str,),
    "lockstep": (str,),
}


class DamagedError(CheckpointError):
    """A checkpoint is damaged: its files or contents differ from those that were written."""


class NewerFormatError(CheckpointError):
    """A checkpoint has a format that this version cannot read: a newer version of Lockstep wrote it."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The dtype and shape of a tensor."""

    dtype: str  # such as `float32`
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FileSpec:
    """Size and SHA-256 of one file of a checkpoint, as the checkpoint's manifest states them."""

    bytes: int
    sha256: str

    @staticmethod
    def of(path: Path) -> FileSpec:
        """Return size and SHA-256 of the file at `path`."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return FileSpec(os.fstat(file.fileno()).st_size, digest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The contents of `manifest.json`: all information about a checkpoint except its tensors."""

    identity: Mapping[str, Any]  # of the run, see `lockstep.state.files.run_file`; JSON
    step: int  # updates that the run had done
    best: float | None  # the rating of this state, larger is better
    text: str  # the state besides the tensors, as it was given to `save`
    tensors: Mapping[str, TensorSpec]
    files: Mapping[str, FileSpec]  # all files of the checkpoint besides the manifest
    lockstep: str = __version__  # the version that wrote the checkpoint

    def dumps(self) -> str:
        """Return the manifest as the text of a `manifest.json` file, which ends with a checksum."""
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps({**content, "checksum": _checksum(content)}, indent=1) + "\n"

    @staticmethod
    def loads(text: str) -> Manifest:
        """Parse `text`, the contents of a `manifest.json` file, and return the manifest.

        Raises:
            NewerFormatError: if the manifest has a later format.
            DamagedError: if `text` is not a manifest, or does not match the checksum in it.
        """
        try:
            content = json.loads(text)
            if isinstance(content["format"], int) and content["format"] > FORMAT:
                raise NewerFormatError(
                    f"it has format {content['format']}, written by Lockstep "
                    f"{content.get('lockstep', '?')}; expected format {FORMAT}",
                    hint="install that version of Lockstep, or a later one",
                )
            checksum = content.pop("checksum")
            if checksum != _checksum(content):
                raise DamagedError(f"{MANIFEST} has a different checksum than it says")
            del content["format"]
            for name, kinds in _KINDS.items():
                _check(name, content[name], kinds)
            tensors, files = content.pop("tensors"), content.pop("files")
            return Manifest(
                **content,
                tensors={name: _tensor(name, **spec) for name, spec in tensors.items()},
                files={name: _file(name, **spec) for name, spec in files.items()},
            )
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{MANIFEST} is no manifest: {error}") from error

    def differences(self, identity: Mapping[str, Any]) -> list[str]:
        """Return one line of text per field that differs between this manifest's run and `identity`."""
        now = json.loads(json.dumps(identity))
        names = [*now, *(name for name in self.identity if name not in now)]
        return [
            f"{name}: {self.identity.get(name)!r} recorded, {now.get(name)!r} now"
            for name in names
            if self.identity.get(name) != now.get(name)
        ]

    def verify(self, directory: Path) -> None:
        """Raise an error unless all files in `directory` have the recorded sizes and checksums.

        Raises:
            DamagedError: naming the first file that differs.
        """
        for name in self.files:
            self.verify_size(directory, name)
        for name, expected in self.files.items():
            if FileSpec.of(directory / name).sha256 != expected.sha256:
                raise DamagedError(f"{name} has a different checksum than when it was written")

    def verify_size(self, directory: Path, name: str) -> None:
        """Raise an error unless the file `name` in `directory` has the recorded size.

        Raises:
            DamagedError: if the size differs, or the file is missing.
        """
        expected = self.files[name].bytes
        try:
            size = (directory / name).stat().st_size
        except FileNotFoundError:
            raise DamagedError(f"{name} is missing") from None
        if size != expected:
            raise DamagedError(f"{name} has {size} bytes; expected {expected}")


def read_manifest(directory: Path) -> Manifest:
    """Return the manifest of the checkpoint in `directory`.

    Raises:
        NewerFormatError: if the manifest has a later format.
        DamagedError: if the manifest is missing or has changed.
    """
    try:
        text = (directory / MANIFEST).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DamagedError(f"{MANIFEST} is missing") from None
    except UnicodeDecodeError as error:
        raise DamagedError(f"{MANIFEST} is no text: {error}") from error
    return Manifest.loads(text)


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write the manifest of the checkpoint in `directory`, atomically."""
    atomic_write(directory / MANIFEST, manifest.dumps(), FILE_MODE)


def note_best(directory: Path, best: float) -> None:
    """Set `best`, the rating of a checkpoint, in the manifest of the checkpoint in `directory`.

    Raises:
        CheckpointError: if the manifest cannot be read.
        OSError: if the manifest cannot be written.
    """
    manifest = read_manifest(directory)
    if manifest.best != best:
        write_manifest(directory, replace(manifest, best=best))


def _tensor(name: str, dtype: Any, shape: Any) -> TensorSpec:
    _check(name, dtype, (str,))
    _check(name, shape, (list,))
    for length in shape:
        _check(name, length, (int,))
    return TensorSpec(dtype, tuple(shape))


def _file(name: str, bytes: Any, sha256: Any) -> FileSpec:  # noqa: A002 - the word in the file
    if Path(name).name != name or name == "..":
        raise DamagedError(f"{MANIFEST} names {name!r}, which is no file of the checkpoint")
    _check(name, bytes, (int,))
    _check(name, sha256, (str,))
    return FileSpec(bytes, sha256)


def _check(name: str, value: Any, kinds: tuple[type, ...]) -> None:
    # `True` is an int to Python, and no number in JSON.
    if type(value) not in kinds or (int in kinds and kinds != _RATING and value < 0):
        expected = " or ".join("nothing" if k is type(None) else k.__name__ for k in kinds)
        raise DamagedError(f"{MANIFEST} says {value!r:.40} of {name}; expected {expected}")


def _checksum(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"


# --- checkpoints of a directory ----------------------------------------------------------------------


def warn_on_stderr(message: str) -> None:
    """Write a warning to standard error."""
    sys.stderr.write(f"{message}\n")


@dataclass(frozen=True, slots=True)
class ValidCheckpoint:
    """A checkpoint on disk whose files match the checksums of its manifest."""

    path: Path
    manifest: Manifest


def place(directory: Path, key: Key) -> Path:
    """Return the path in `directory` of the checkpoint with a `key`: step, and number in the step."""
    step, number = key
    return directory / (f"step-{step:08d}.{number}" if number else f"step-{step:08d}")


def key_of(path: Path) -> Key | None:
    """Return the step and the number in a checkpoint's file name; `None` for any other file name."""
    match = _PATTERN.fullmatch(path.name)
    return None if match is None else (int(match[1]), int(match[2] or 0))


def paths(directory: Path) -> dict[Key, Path]:
    """Return the paths of all checkpoints by step and number, the newest first, damaged ones too.

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


def look(path: Path, identity: Mapping[str, Any] | None = None) -> ValidCheckpoint:
    """Verify sizes and checksums of the files of the checkpoint at `path`, and return the checkpoint.

    Raises:
        RunDirectoryError: if the checkpoint is of a run with another `identity` (script, seed and so on).
        CheckpointError: if the checkpoint is damaged or cannot be read.
    """
    try:
        found = ValidCheckpoint(path, read_manifest(path))
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


def remove(path: Path) -> None:
    """Rename and remove the checkpoint `path`, so that a kill leaves no part of it under its name."""
    aside = path.with_name(f"{REMOVED}{path.name}")
    with contextlib.suppress(OSError):
        shutil.rmtree(aside, ignore_errors=True)
        path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


class Catalog:
    """Lists, verifies and removes the checkpoints of one run in a directory.

    Args:
        directory: contains one directory per checkpoint.
        identity: script, arguments, seed and so on of the run, as JSON values; a checkpoint of another run
            is an error. With `None`, checkpoints of any run are accepted.
        warn: called with a message for each checkpoint that is skipped.
        parent: name of a checkpoint in `directory` that another run has saved, and that is accepted.
    """

    def __init__(
        self,
        directory: Path,
        identity: Mapping[str, Any] | None,
        warn: Warn = warn_on_stderr,
        *,
        parent: str | None = None,
    ) -> None:
        self.directory, self.warn, self.parent = directory, warn, parent
        self.identity = json.loads(json.dumps(identity))
        self.confirmed: Callable[[], int | None] = lambda: None  # step up to which audits confirm
        #: Checkpoints newer than the one that the run resumed from: their files did not verify.
        self.damaged: set[Key] = set()

    def newest(self) -> ValidCheckpoint | None:
        """Return the newest checkpoint whose files verify; `None` if there is none.

        Damaged, half removed and newer-format checkpoints are skipped, with a warning.

        Raises:
            RunDirectoryError: if a checkpoint was saved by another run.
            CheckpointError: if the directory cannot be read.
        """
        there = paths(self.directory)
        self.damaged = set()
        for key, path in there.items():
            try:
                return look(path, None if path.name == self.parent else self.identity)
            except CheckpointError as error:
                self.damaged.add(key)
                hint = f"; {error.hint}" if error.hint else ""
                self.warn(
                    f"lockstep: warning: the checkpoint {path} is skipped: {error.message}{hint}"
                )
        if there:
            what = f"no checkpoint of the {len(there)} in {self.directory}"
            self.warn(f"lockstep: warning: {what} can be used")
        return None

    def newest_text(self) -> str | None:
        """Return the text (the state without tensors) of the newest manifest; other files are not read.

        Raises:
            CheckpointError: if the directory cannot be read.
        """
        for path in paths(self.directory).values():
            with contextlib.suppress(CheckpointError, OSError):
                return read_manifest(path).text
        return None

    def set_aside(self, step: int) -> list[Path]:
        """Rename the checkpoints of steps after `step`, so that no run resumes from them; return the paths.

        Raises:
            CheckpointError: if a checkpoint cannot be renamed.
        """
        moved = []
        for path in [path for key, path in paths(self.directory).items() if key[0] > step]:
            asides = (path.with_name(f"unconfirmed{'-' * n}{path.name}") for n in count(1))
            try:
                moved.append(path.rename(next(aside for aside in asides if not aside.exists())))
            except OSError as error:
                what = f"{path}, which no audit has confirmed, cannot be renamed: {error.strerror}"
                raise CheckpointError(what, hint="move it away") from error
        return moved
