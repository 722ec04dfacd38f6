"""Check the file system of the run directory: locks, rename, free space, and whether nodes share it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from lockstep.tools.doctor.check import (
    Facts,
    Finding,
    Level,
    NodeReports,
    Options,
    check,
    check_each,
)
from lockstep.tools.doctor.node_rendezvous import NodeGroup
from lockstep.tools.quantities import binary_size

_GIB = 1 << 30
_PREFIX = ".lockstep-doctor-"


def _existing(run_dir: Path) -> Path:
    """Return `run_dir`, or the nearest directory above it that exists."""
    # `Path.exists` may raise below a directory without access.
    return next(one for one in (run_dir, *run_dir.absolute().parents) if os.access(one, os.F_OK))


def _look(asked: Options) -> Facts:
    place = _existing(asked.run_dir)
    facts = {"place": str(place.absolute())}
    if not place.is_dir():
        return facts | {"problem": "is a file; expected a directory"}
    try:
        found = os.statvfs(place)
        with tempfile.TemporaryDirectory(dir=place, prefix=_PREFIX) as name:
            tried = {"locks": _locks(Path(name)), "renames": _renames(Path(name))}
    except OSError as error:
        return facts | {"problem": f"cannot be written: {error.strerror}"}
    return facts | tried | {"free": found.f_bavail * found.f_frsize}


def _locks(directory: Path) -> str:
    """Test file locks in `directory`; return the problem in words, or "".

    A locked file must refuse a second lock.
    """
    with (directory / "lock").open("w") as first, (directory / "lock").open("w") as second:
        try:
            _takes(first.fileno())
        except OSError as error:
            return f"has no locks (flock): {error.strerror}"
        return "gives one lock (flock) twice" if _takes(second.fileno()) else ""


def _takes(file: int) -> bool:
    """Try to lock the open file with descriptor `file`, without waiting; return whether it worked.

    Raises:
        OSError: if the file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _renames(directory: Path) -> str:
    """Test renames of a file and a directory in `directory`; return the problem in words, or ""."""
    old, new = directory / "old", directory / "new"
    old.write_text("1")
    new.write_text("2")
    try:
        old.replace(new)
        (directory / "draft").mkdir()
        (directory / "draft").rename(directory / "whole")
    except OSError as error:
        return f"does not rename in place: {error.strerror}"
    is_right = new.read_text() == "1" and not old.exists() and (directory / "whole").is_dir()
    return "" if is_right else "does not rename in place: the old file is still there"


@check_each("storage", look=_look)
def storage(facts: Facts) -> list[Finding] | str:
    """Return findings on the file system of a node's run directory, or one line if all is well.

    It is judged by file locks, renames and free space.
    """
    place = facts["place"]
    if "problem" in facts:
        advice = "choose another place with --run-dir"
        return [Finding("failure", f"{place} {facts['problem']}", advice)]
    advice = "checkpoints need it: choose another place with --run-dir, or mount it with locks"
    found = [
        Finding("failure", f"the file system of {place} {problem}", advice)
        for problem in (facts["locks"], facts["renames"])
        if problem
    ]
    if facts["free"] < _GIB:
        text = f"{binary_size(facts['free'])} are free at {place}; expected at least 1 GiB"
        level: Level = "failure" if facts["free"] < _GIB // 64 else "warning"
        found.append(Finding(level, text, "free it, or choose another place with --run-dir"))
    return found or f"{place}: locks, rename, {binary_size(facts['free'])} free"


def _together(rendezvous: NodeGroup, seen: NodeReports, asked: Options) -> Facts:
    """Test locks between nodes: node 0 locks a new file in the run directory, the others try to.

    Return three facts: `sees`, whether this node sees the file; `takes`, whether this node gets a lock that
    node 0 holds; `problem`, the text of an error. Return `None` if there is only one node.
    """
    if rendezvous.alone:
        return None
    name = rendezvous.gather("shared/name", secrets.token_hex(8))[0]
    path = _existing(asked.run_dir) / f"{_PREFIX}{name}"
    facts = {"sees": False, "takes": False, "problem": ""}
    with contextlib.ExitStack() as stack:
        try:
            if rendezvous.index == 0:
                locked = stack.enter_context(path.open("w"))
                stack.callback(lambda: path.unlink(missing_ok=True))
                _takes(locked.fileno())
        except OSError as error:
            facts["problem"] = f"{error.strerror}"
        rendezvous.gather("shared/made", own=True)
        facts["sees"] = os.access(path, os.F_OK)
        if not os.access(path.parent, os.X_OK):
            facts["problem"] = os.strerror(errno.EACCES)
        try:
            if rendezvous.index > 0 and facts["sees"]:
                with path.open("r+") as other:
                    facts["takes"] = _takes(other.fileno())
        except OSError as error:
            facts["problem"] = f"{error.strerror}"
        rendezvous.gather("shared/seen", own=True)
    return facts


@check("shared", together=_together)
def shared(seen: NodeReports) -> Iterator[Finding]:
    """Yield findings on run directories that nodes do not share, or whose locks fail between nodes."""
    answers = seen.of("shared")
    failed = [(label, facts["problem"]) for label, facts in answers if facts["problem"]]
    for label, problem in failed:
        text = f"{label} cannot open and lock a file in the run directory: {problem}"
        yield Finding("failure", text, "choose a place with --run-dir that all nodes can write")
    if answers and answers[0][1]["problem"]:
        return
    apart = [label for label, facts in answers if not facts["sees"] and not facts["problem"]]
    for label, facts in answers:
        if facts["takes"]:
            text = f"{label} takes a lock in the run directory that {answers[0][0]} holds"
            advice = "mount it with locks between nodes: NFS 4, or Lustre with the option flock"
            yield Finding("failure", text, advice)
    if apart:
        text = f"the run directory is not shared: {', '.join(apart)} does not see files of {answers[0][0]}"
        advice = (
            "a checkpoint is lost with the node that wrote it: --run-dir on a shared file system"
        )
        yield Finding("warning", text, advice)
    elif answers and not failed and not any(facts["takes"] for _, facts in answers):
        yield Finding("ok", "all nodes share the run directory, and its locks")
