"""Unfinished runs of a launch's script: `--resume` continues the newest, a launch without it names it."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.launch.given import Given
from lockstep.launch.nodes.config import rendezvous_config
from lockstep.launch.nodes.membership import Common
from lockstep.launch.spec import LaunchSpec
from lockstep.state.files import run_file
from lockstep.state.record import unfinished
from lockstep.state.record.unfinished import BASE, Unfinished

#: How a user asks for the newest unfinished run, and for one by its directory.
_FLAGS = {"resume": "--resume", "run_dir": "--run-dir "}


def asked(spec: LaunchSpec) -> bool:
    """Return whether the launch is to continue an unfinished run.

    Raises:
        UsageError: if it is also to begin anew.
    """
    settings = spec.settings
    if not settings.value("resume", os.environ):
        return False
    if settings.value("fresh", os.environ):
        raise unfinished.contradicting(settings.origin("resume"), settings.origin("fresh"))
    return True


def resumed(spec: LaunchSpec, name: str) -> LaunchSpec:
    """Return `spec` with the directory of the run that it continues, if it is to continue one.

    Launchers on several nodes agree on a directory in their rendezvous: `stamp`, and then `check`.

    Raises:
        UsageError: if there is none.
    """
    if not asked(spec) or _on_several_nodes(spec):
        return spec
    given = {**spec.settings, "run_dir": _require(spec, name, _find(spec, name))}
    return dataclasses.replace(spec, settings=Given(**given))


def stamp(spec: LaunchSpec, name: str) -> str | None:
    """Return the name in `runs/NAME` of the run that this launcher would continue; `None` for a new one."""
    if not asked(spec) or spec.run_dir is not None:
        return None
    found = _find(spec, name)
    return found[0].directory.name if found else None


def check(spec: LaunchSpec, name: str, common: Common) -> None:
    """Refuse to begin a new run where this launcher is to continue one, and the first launcher found none.

    Raises:
        UsageError: if that is so.
    """
    if spec.run_dir is None and asked(spec) and not common.resumes:
        _require(spec, name, [])


def note(spec: LaunchSpec, name: str) -> str | None:
    """Return the line that names the newest unfinished run, where a new one begins in its place."""
    if spec.run_dir is not None or asked(spec):
        return None
    found = _find(spec, name)
    return unfinished.note(found, **_FLAGS) if found else None


def meant(spec: LaunchSpec) -> dict[str, Any]:
    """Return what the identity of the same run has, as far as the launch says it; `None` for any value."""
    names = ("seed", "replicas", "threads", "precision")
    said = {name: spec.settings.value(name, os.environ) for name in names}
    if spec.kind == "module":  # its directory has its name
        return said | {"arguments": list(spec.args)}
    script, arguments = Path(spec.target).name, list(spec.args)
    if spec.kind == "function":
        script, arguments = run_file.script_and_arguments()
    return said | {"script": script, "arguments": arguments}


def _require(spec: LaunchSpec, name: str, found: list[Unfinished]) -> Path:
    what = " ".join([name if spec.kind == "function" else spec.target, *spec.args])
    where = spec.run_dir or BASE
    said = {**_FLAGS, "resume": spec.settings.origin("resume")}
    return unfinished.require(found, what, where, **said)


def _find(spec: LaunchSpec, name: str) -> list[Unfinished]:
    return unfinished.find(_directories(spec, name), meant(spec))


def _directories(spec: LaunchSpec, name: str) -> Iterable[Path]:
    if spec.run_dir is not None:
        return [spec.run_dir]
    # Under `python` a run makes its directory below its own name, and not below the script's. The launchers
    # of several nodes, and those of modules and functions, only look where they make theirs.
    anywhere = spec.kind == "script" and not _on_several_nodes(spec)
    return BASE.glob("*/*") if anywhere else (BASE / name).glob("*")


def _on_several_nodes(spec: LaunchSpec) -> bool:
    work = (spec.target, *spec.args)
    return spec.kind != "function" and rendezvous_config(spec.nodes, work, os.environ) is not None
