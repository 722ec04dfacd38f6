"""Earlier runs of a launch's command: a finished one has nothing to do, an unfinished one can continue."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.errors import RunDirectoryError
from lockstep.launch.flag_settings import FlagSettings
from lockstep.launch.nodes.config import rendezvous_config
from lockstep.launch.nodes.membership import Common
from lockstep.launch.spec import LaunchSpec
from lockstep.state.files import run_file
from lockstep.state.record import unfinished
from lockstep.state.record.unfinished import BASE, Unfinished

#: Set in `run.json` by the launcher, when the launch of a finished run has ended with exit code 0.
_MARK = "complete"
#: The flags for the newest unfinished run, and for one by its directory.
_FLAGS = {"resume": "--resume", "run_dir": "--run-dir "}


def finished(spec: LaunchSpec) -> str | None:
    """Return the user's message if the same command has completed in the directory that it names.

    `None` where there is something to do, or where the ranks report what is wrong with the directory.
    """
    if spec.run_dir is None or spec.settings.value("fresh", os.environ) or not _is_only(spec):
        return None
    try:
        recorded = run_file.read(spec.run_dir) or {}
    except RunDirectoryError:
        return None
    if recorded.get("status") != "finished" or "next" in recorded or not recorded.get(_MARK):
        return None
    if not unfinished.is_same(recorded.get("identity", {}), _identity(spec)):
        return None
    return (
        f"lockstep: finished already steps={recorded.get('steps')} digest={recorded.get('digest')}: "
        f"{spec.run_dir}; --fresh begins anew"
    )


def mark_complete(spec: LaunchSpec, directory: Path) -> None:
    """Record in a finished run's `run.json` that the whole script has ended with exit code 0."""
    if not _is_only(spec):
        return
    with contextlib.suppress(
        RunDirectoryError
    ):  # without the mark, the same command runs the script
        recorded = run_file.read(directory)
        if recorded is not None and recorded.get("status") == "finished":
            run_file.write(directory, {**recorded, _MARK: True})


def resumed(spec: LaunchSpec, name: str) -> LaunchSpec:
    """Return `spec` with the directory of the run that it continues, if it is to continue one.

    Launchers on several nodes agree on a directory in their rendezvous: `stamp`, and then `check`.

    Raises:
        UsageError: if there is none.
    """
    if not _resumes(spec) or _on_several_nodes(spec):
        return spec
    given = {**spec.settings, "run_dir": _require(spec, name, _find(spec, name))}
    return dataclasses.replace(spec, settings=FlagSettings(**given))


def stamp(spec: LaunchSpec, name: str) -> str | None:
    """Return the name in `runs/NAME` of the run that this launcher would continue; `None` for a new one."""
    if not _resumes(spec) or spec.run_dir is not None:
        return None
    found = _find(spec, name)
    return found[0].directory.name if found else None


def check(spec: LaunchSpec, name: str, common: Common) -> None:
    """Refuse to begin a new run where this launcher is to continue one, and the first launcher found none.

    Raises:
        UsageError: if that is so.
    """
    if spec.run_dir is None and _resumes(spec) and not common.resumes:
        _require(spec, name, [])


def note(spec: LaunchSpec, name: str) -> str | None:
    """Return the line that names the newest unfinished run, where a new one begins in its place."""
    if spec.run_dir is not None or _resumes(spec):
        return None
    found = _find(spec, name)
    return unfinished.note(found, **_FLAGS) if found else None


def _resumes(spec: LaunchSpec) -> bool:
    """Whether the launch is to continue an unfinished run.

    Raises:
        UsageError: if it is also to begin anew.
    """
    settings = spec.settings
    if not settings.value("resume", os.environ):
        return False
    if settings.value("fresh", os.environ):
        raise unfinished.contradicting(settings.origin("resume"), settings.origin("fresh"))
    return True


def _identity(spec: LaunchSpec) -> dict[str, Any]:
    """Return what the launch fixes of the run's identity; `None` for any value."""
    names = ("seed", "replicas", "threads", "precision")
    fixed = {name: spec.settings.value(name, os.environ) for name in names}
    if spec.kind == "module":  # its directory has its name
        return fixed | {"arguments": list(spec.args)}
    script, arguments = Path(spec.target).name, list(spec.args)
    if spec.kind == "function":
        script, arguments = run_file.script_and_arguments()
    return fixed | {"script": script, "arguments": arguments}


def _require(spec: LaunchSpec, name: str, found: list[Unfinished]) -> Path:
    what = " ".join([name if spec.kind == "function" else spec.target, *spec.args])
    flags = {**_FLAGS, "resume": spec.settings.origin("resume")}
    return unfinished.require(found, what, spec.run_dir or BASE, **flags)


def _find(spec: LaunchSpec, name: str) -> list[Unfinished]:
    # Under `python` a run makes its directory below its own name, and not below the script's. The launchers
    # of several nodes, and those of modules and functions, only look where they make theirs.
    anywhere = spec.kind == "script" and not _on_several_nodes(spec)
    directories: Iterable[Path] = BASE.glob("*/*") if anywhere else (BASE / name).glob("*")
    if spec.run_dir is not None:
        directories = [spec.run_dir]
    return unfinished.find(directories, _identity(spec))


def _on_several_nodes(spec: LaunchSpec) -> bool:
    work = (spec.target, *spec.args)
    return spec.kind != "function" and rendezvous_config(spec.nodes, work, os.environ) is not None


def _is_only(spec: LaunchSpec) -> bool:
    """Whether `spec` runs a script, and this launcher is the only one."""
    return spec.kind == "script" and not _on_several_nodes(spec)
