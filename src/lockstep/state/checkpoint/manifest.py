"""`manifest.json` of a checkpoint: its run and step, dtypes and shapes of tensors, checksums of files.

Does not import torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.state.files.atomic_file import atomic_write
from lockstep.version import __version__

NAME = "manifest.json"
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
    """Size and SHA-256 of a file."""

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
        """Return the text of `manifest.json`, which includes its own checksum."""
        content = {"format": FORMAT, **asdict(self)}
        return json.dumps({**content, "checksum": _checksum(content)}, indent=1) + "\n"

    @staticmethod
    def loads(text: str) -> Manifest:
        """Return the manifest of a `text` that `dumps` has returned.

        Raises:
            NewerFormatError: if the manifest has a later format.
            DamagedError: if the text has changed.
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
                raise DamagedError(f"{NAME} has another checksum than it says")
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
            raise DamagedError(f"{NAME} is no manifest: {error}") from error

    def differences(self, identity: Mapping[str, Any]) -> list[str]:
        """Return one line for each field in which `identity` differs from the recorded identity."""
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
                raise DamagedError(f"{name} has another checksum than when it was written")

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


def read(directory: Path) -> Manifest:
    """Return the manifest of the checkpoint in `directory`.

    Raises:
        NewerFormatError: if the manifest has a later format.
        DamagedError: if the manifest is missing or has changed.
    """
    try:
        text = (directory / NAME).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise DamagedError(f"{NAME} is missing") from None
    except UnicodeDecodeError as error:
        raise DamagedError(f"{NAME} is no text: {error}") from error
    return Manifest.loads(text)


def write(directory: Path, manifest: Manifest) -> None:
    """Write the manifest of the checkpoint in `directory`, atomically.

    Raises:
        OSError: if the file cannot be written.
    """
    atomic_write(directory / NAME, manifest.dumps(), FILE_MODE)


def note_best(directory: Path, best: float) -> None:
    """Write the rating `best` into the manifest of the checkpoint in `directory`.

    Raises:
        CheckpointError: if the manifest cannot be read.
        OSError: if the manifest cannot be written.
    """
    manifest = read(directory)
    if manifest.best != best:
        write(directory, replace(manifest, best=best))


def _tensor(name: str, dtype: Any, shape: Any) -> TensorSpec:
    _check(name, dtype, (str,))
    _check(name, shape, (list,))
    for length in shape:
        _check(name, length, (int,))
    return TensorSpec(dtype, tuple(shape))


def _file(name: str, bytes: Any, sha256: Any) -> FileSpec:  # noqa: A002 - the word in the file
    if Path(name).name != name or name == "..":
        raise DamagedError(f"{NAME} names {name!r}, which is no file of the checkpoint")
    _check(name, bytes, (int,))
    _check(name, sha256, (str,))
    return FileSpec(bytes, sha256)


def _check(name: str, value: Any, kinds: tuple[type, ...]) -> None:
    # `True` is an int to Python, and no number in JSON.
    if type(value) not in kinds or (int in kinds and kinds != _RATING and value < 0):
        expected = " or ".join("nothing" if k is type(None) else k.__name__ for k in kinds)
        raise DamagedError(f"{NAME} says {value!r:.40} of {name}; expected {expected}")


def _checksum(content: Mapping[str, Any]) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(canonical.encode()).hexdigest()}"
