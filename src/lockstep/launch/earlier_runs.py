"""Earlier runs of the launched command: finished ones are not repeated, unfinished ones can be resumed."""

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
from lockstep.state.record.unfinished import BASE, FIXED, UnfinishedRun

#: Key in the `run.json` of a finished run: whether the whole script has ended with exit code 0.
_MARK = "complete"
#: Flags that resume the newest unfinished run, or one by its directory, for messages.
_FLAGS = {"resume": "--resume", "run_dir": "--run-dir "}


def finished(spec: LaunchSpec) -> str | None:
    """Return a message if an earlier launch of this command has finished the run; else `None`.

    Only the run in the given run directory is looked at.
    """
    if spec.run_dir is None or spec.settings.value("fresh", os.environ) or not _is_only(spec):
        return None
    recorded: dict[str, Any] = {}
    is_done = False
    with contextlib.suppress(RunDirectoryError):  # the ranks report it
        recorded = run_file.read(spec.run_dir) or {}
        is_complete = recorded.get("status") == "finished" and recorded.get(_MARK)
        is_done = bool(is_complete) and not run_file.continues(spec.run_dir, recorded)
    if not (is_done and unfinished.is_same(recorded.get("identity", {}), _identity(spec))):
        return None
    return (
        f"lockstep: finished already steps={recorded.get('steps')} digest={recorded.get('digest')}: "
        f"{spec.run_dir}; --fresh begins anew"
    )


def mark_complete(spec: LaunchSpec, directory: Path) -> None:
    """Record in a finished run's `run.json` that the whole script has ended with exit code 0."""
    with contextlib.suppress(RunDirectoryError):  # then the same command runs the script again
        recorded = run_file.read(directory) if _is_only(spec) else None
        if recorded is not None and recorded.get("status") == "finished":
            run_file.write(directory, {**recorded, _MARK: True})


def resumed(spec: LaunchSpec, name: str) -> LaunchSpec:
    """Return `spec` with the directory of the unfinished run that this launch resumes.

    `spec` is returned unchanged for a new run, and on several nodes, where the launchers choose the
    directory in their rendezvous. `name`: the name of the run's directory in `runs/`.

    Raises:
        UsageError: if `--resume` is set and there is no unfinished run.
    """
    if not _resumes(spec) or _on_several_nodes(spec):
        return spec
    given = {**spec.settings, "run_dir": _require(spec, name, _find(spec, name))}
    return dataclasses.replace(spec, settings=FlagSettings(**given))


def stamp(spec: LaunchSpec, name: str) -> str | None:
    """Return the name of the directory in `runs/NAME/` whose run this launcher would resume.

    `name` stands for NAME. Return `None` if the launcher would begin a new run.
    """
    found = _find(spec, name) if spec.run_dir is None and _resumes(spec) else []
    return found[0].directory.name if found else None


def check(spec: LaunchSpec, name: str, common: Common) -> None:
    """Raise an error if a launch on several nodes has `--resume`, but no run to resume.

    `name` is the name of the run's directory in `runs/`. `common` are the constants that the first launcher
    chose, such as the run to resume.

    Raises:
        UsageError: if `--resume` is set and the first launcher has found no unfinished run.
    """
    if spec.run_dir is None and _resumes(spec) and not common.resumes:
        _require(spec, name, [])


def note(spec: LaunchSpec, name: str) -> str | None:
    """Return a note about the command's newest unfinished run, if the launch begins a new run.

    `name` is the name of the directory in `runs/` that is searched. Returns `None` if the launch resumes a
    run, or there is no unfinished one.
    """
    found = _find(spec, name) if spec.run_dir is None and not _resumes(spec) else []
    return unfinished.note(found, **_FLAGS) if found else None


def _resumes(spec: LaunchSpec) -> bool:
    """Whether `--resume` is set.

    Raises:
        UsageError: if `--fresh` is set, too.
    """
    settings = spec.settings
    if not settings.value("resume", os.environ):
        return False
    if settings.value("fresh", os.environ):
        raise unfinished.contradicting(settings.origin("resume"), settings.origin("fresh"))
    return True


def _identity(spec: LaunchSpec) -> dict[str, Any]:
    """Return the settings and arguments that an unfinished run must have to belong to a launch.

    `None` stands for any value.
    """
    fixed = {name: spec.settings.value(name, os.environ) for name in FIXED}
    if spec.kind == "module":  # its directory has its name
        return fixed | {"arguments": list(spec.args)}
    script, arguments = Path(spec.target).name, list(spec.args)
    if spec.kind == "function":
        script, arguments = run_file.script_and_arguments()
    return fixed | {"script": script, "arguments": arguments}


def _require(spec: LaunchSpec, name: str, found: list[UnfinishedRun]) -> Path:
    what = " ".join([name if spec.kind == "function" else spec.target, *spec.args])
    flags = {**_FLAGS, "resume": spec.settings.origin("resume")}
    return unfinished.require(found, what, spec.run_dir or BASE, **flags)


def _find(spec: LaunchSpec, name: str) -> list[UnfinishedRun]:
    # Under `python` a run's directory has the name of the run, and not that of the script. Launchers of
    # several nodes, of modules and of functions search only the directory where they make runs.
    anywhere = spec.kind == "script" and not _on_several_nodes(spec)
    directories: Iterable[Path] = BASE.glob("*/*") if anywhere else (BASE / name).glob("*")
    if spec.run_dir is not None:
        directories = [spec.run_dir]
    return unfinished.find(directories, _identity(spec))


def _on_several_nodes(spec: LaunchSpec) -> bool:
    work = (spec.target, *spec.args)
    return spec.kind != "function" and rendezvous_config(spec.nodes, work, os.environ) is not None


def _is_only(spec: LaunchSpec) -> bool:
    """Whether the target is a script, and the launch has a single launcher."""
    return spec.kind == "script" and not _on_several_nodes(spec)
