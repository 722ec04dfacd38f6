"""Read, write and check `run.json`: the run's identity, layout of each start, status and result."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.errors import RunDirectoryError
from lockstep.state.files.atomic_file import atomic_write
from lockstep.world.environments import ray

NAME = "run.json"
#: Format of the file; it grows with each change that an older version of Lockstep could not read.
FORMAT = 1
#: Arguments with which torchrun passes the local rank to old scripts: they differ from rank to rank.
_LOCAL_RANK = ("--local_rank=", "--local-rank=")
#: Types of the fields that are read again, also within objects (`{…}`) and within the entries of lists
#: (`[…]`); any field may be missing.
_FIELDS: dict[str, Any] = {
    "format": (int,),
    "identity": {"replicas": (int,), "threads": (int,)},
    "launch": (str, type(None)),
    "status": (str,),
    "step": (int,),
    "steps": (int,),
    "seconds": (int, float),
    "digest": (str,),
    "fingerprint": (str,),
    "generations": [{"ranks": (int,), "nodes": (int,), "time": (int, float)}],
    "next": (str,),
    "parent": {},
    "audits": {
        "count": (int,),
        "confirmed": (int, type(None)),
        "unconfirmed": (bool,),
        "found": [{}],
    },
    "provenance": {},
    "complete": (bool,),
}
#: Fields whose numbers are at least 1; other numbers are at least 0.
_POSITIVE = ("replicas", "threads", "ranks", "nodes", "time")


@dataclass(frozen=True, slots=True)
class Identity:
    """Recorded properties that the result of a run depends on: script, arguments, seed, versions etc.

    The number of ranks is none of them, nor are strategy and exchange of an exact run.
    """

    name: str
    script: str  # file name
    arguments: list[str]  # of the script
    seed: int
    replicas: int
    threads: int  # intra-op threads per process
    precision: str  # of forward passes
    device: str  # kind of device
    #: `exact`, or strategy, exchange and `sync_every` of a run whose result need not be exact
    method: str = "exact"
    versions: dict[str, str] = field(default_factory=dict)

    def differences(self, other: dict[str, Any]) -> list[str]:
        """Return one line for each field in which the recorded identity `other` differs from this one."""
        return [
            f"{name}: {other.get(name)!r} recorded, {value!r} now"
            for name, value in asdict(self).items()
            if other.get(name) != value
        ]


def versions(torch_version: str, lockstep_version: str) -> dict[str, str]:
    """Return the versions of Python, torch and Lockstep, which belong to a run's identity."""
    return {
        "python": platform.python_version(),
        "torch": torch_version,
        "lockstep": lockstep_version,
    }


def script_and_arguments() -> tuple[str, list[str]]:
    """Return the file name of the running script, and its arguments without torchrun's `--local-rank`.

    In a worker of Ray, which has no script of the user, return `"ray"` and no arguments.
    """
    if ray.is_worker(os.environ):
        return "ray", []
    own = [word for word in sys.argv[1:] if not word.startswith(_LOCAL_RANK)]
    return Path(sys.argv[0]).name, own


def read(directory: Path) -> dict[str, Any] | None:
    """Return the contents of `run.json` in `directory`, or `None` if the file does not exist.

    Raises:
        RunDirectoryError: if the file is damaged, or of a newer format.
    """
    path = directory / NAME
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(recorded, dict):
        raise _damaged(path, "it is no record of a run")
    if isinstance(recorded.get("format"), int) and recorded["format"] > FORMAT:
        raise RunDirectoryError(
            f"{path} has format {recorded['format']}; expected {FORMAT} at most",
            hint="a newer version of Lockstep wrote it: use that one",
        )
    _check_kinds(path, "run", recorded, _FIELDS)
    return recorded


def _check_kinds(path: Path, name: str, value: Any, expected: Any) -> None:
    """Raise `RunDirectoryError` if the field `name`, or a field in it, has a wrong type or number.

    `expected` describes `value` as `_FIELDS` does. `path` is the file that the message names.
    """
    kinds = expected if isinstance(expected, tuple) else (type(expected),)
    is_number = type(value) in (int, float)
    if type(value) not in kinds or (is_number and not value >= (name in _POSITIVE)):
        raise _damaged(path, f"{name} is {value!r:.40}")
    if isinstance(expected, dict):
        for inner in expected.keys() & value.keys():
            _check_kinds(path, inner, value[inner], expected[inner])
    if isinstance(expected, list):
        for entry in value:
            _check_kinds(path, name, entry, expected[0])


def _damaged(path: Path, what: str) -> RunDirectoryError:
    return RunDirectoryError(
        f"{path} cannot be read: {what}",
        hint="name another directory with --run-dir, or remove the file",
    )


def write(directory: Path, content: dict[str, Any]) -> None:
    """Write `run.json` atomically: a reader sees the old file or the new one, never a part.

    Raises:
        RunDirectoryError: if the file cannot be written.
    """
    with writing(directory):
        atomic_write(directory / NAME, json.dumps(content, indent=2) + "\n", 0o600)


@contextlib.contextmanager
def writing(directory: Path) -> Iterator[None]:
    """Context manager: turn an `OSError` into a `RunDirectoryError` that names `directory`."""
    try:
        yield
    except OSError as error:
        raise RunDirectoryError(
            f"the run directory {directory} cannot be written: {error.strerror or error}",
            hint="name another one with --run-dir",
        ) from error


def link(directory: Path, later: Path) -> None:
    """Write `later`, the directory of the script's next run, into the `run.json` in `directory`.

    Raises:
        RunDirectoryError: if the file is damaged, or cannot be written.
    """
    recorded = read(directory)
    if recorded is not None and later != directory:
        write(directory, {**recorded, "next": os.path.relpath(later, directory)})


def kept(directory: Path) -> dict[str, Any]:
    """Return the fields `next` and `parent` of `run.json` in `directory`, as far as it has them.

    They name the script's next run and the parent run, and stay when the file is overwritten. A damaged
    file counts as one without these fields.
    """
    recorded: dict[str, Any] = {}
    with contextlib.suppress(RunDirectoryError):  # damaged as it is, it is replaced
        recorded = read(directory) or {}
    return {name: recorded[name] for name in ("next", "parent") if name in recorded}


def forget(directory: Path) -> None:
    """Remove `run.json` from a run directory, if it exists.

    Raises:
        RunDirectoryError: if the file cannot be removed.
    """
    with writing(directory):
        (directory / NAME).unlink(missing_ok=True)


def continues(directory: Path, recorded: dict[str, Any]) -> bool:
    """Return whether a later run of the same script, after the run in `directory`, has not finished.

    `recorded` is the contents of `run.json` in `directory`; its field `next` names the directory of the
    next run, if there is one.
    """
    seen: set[Path] = set()
    while later := recorded.get("next"):
        directory = Path(os.path.normpath(directory / str(later)))
        if directory in seen:
            return False  # the directories have been moved
        seen.add(directory)
        recorded = read(directory) or {"status": "nothing yet"}
        if recorded.get("status") != "finished":
            return True
    return False


def check(directory: Path, identity: Identity, *, fresh: bool, restarted: bool = False) -> None:
    """Raise an error unless the run with this `identity` may use `directory`.

    It may not if `run.json` is that of a run with another identity, or if there are checkpoints without
    `run.json`. It may not if the recorded run is finished, unless the script has an unfinished later run,
    or `restarted` says that this launch recorded the run before a restart. With `fresh` none of this is an
    error.

    Raises:
        RunDirectoryError: naming each difference, or if `run.json` cannot be read.
    """
    recorded = read(directory)
    if fresh:
        return
    if recorded is None:
        # A run that began anew here would later resume these checkpoints in place of its own.
        if next(directory.glob("checkpoints/step-*"), None) is not None:
            raise RunDirectoryError(
                f"{directory} has checkpoints but no run.json; expected both, or neither",
                hint="restore run.json, move the checkpoints away, or begin anew there with --fresh",
            )
        return
    finished = recorded.get("status") == "finished" and not restarted
    if finished and not continues(directory, recorded):
        raise RunDirectoryError(
            f"the run in {directory} is finished; expected a new or an unfinished one",
            hint="--fresh overwrites it, --run-dir names another directory",
        )
    if "identity" not in recorded:
        return  # it begins with the state of another run, its parent
    differences = identity.differences(recorded["identity"])
    if differences:
        raise RunDirectoryError(
            f"the run in {directory} is another one: " + "; ".join(differences),
            hint="--fresh begins anew there, --run-dir names another directory",
        )
