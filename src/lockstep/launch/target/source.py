"""Source file of a script or module: check that it exists, and parse it without importing it."""

from __future__ import annotations

import ast
import functools
import importlib.util
import shutil
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from lockstep.errors import ScriptNotFoundError
from lockstep.launch.spec import LaunchSpec

#: Exceptions that a search for a module may raise.
_NOT_FOUND = (OSError, ImportError, ValueError)


def check(kind: str, target: str) -> None:
    """Raise an error if the target of a launch, a script or a program, does not exist.

    `kind` is `script`, `program` or another kind of target, which is not checked. A script is a path, and a
    program is searched on `PATH`.

    Raises:
        ScriptNotFoundError: if the script or program does not exist.
    """
    if kind == "script":
        check_script(target)
    elif kind == "program" and shutil.which(target) is None:
        raise ScriptNotFoundError(
            f"the program {target} is not there, or may not be executed; expected one on PATH or a path",
            hint="a Python script needs no --no-python",
        )


def check_script(target: str) -> None:
    """Raise `ScriptNotFoundError` if the path of a script does not exist or is a directory."""
    path = Path(target)
    if path.is_file():
        return
    what = "is a directory" if path.is_dir() else "does not exist"
    raise ScriptNotFoundError(
        f"the script {target} {what}; expected a Python file",
        hint="-m runs a module by its name",
    )


def parse(spec: LaunchSpec) -> ast.Module:
    """Return the syntax tree of the script or module in `spec`; an empty tree if missing or invalid."""
    return _parse_script(_read(_file(spec)))


def parse_file(file: Path) -> ast.Module:
    """Return the syntax tree of a file; an empty tree if the file is unreadable or invalid."""
    return _parse(_read(file))


def _read(file: Path | None) -> bytes:
    try:
        return file.read_bytes() if file is not None else b""
    except _NOT_FOUND:
        return b""


def _parse(text: bytes) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the worker compiles it again, and warns
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])


_parse_script = functools.lru_cache(maxsize=1)(_parse)  # called several times in a launch


def package(spec: LaunchSpec) -> str:
    """Return the package of the module in `spec`, which Python imports first; `""` if there is none."""
    if spec.kind != "module":
        return ""
    parent, _, last = spec.target.rpartition(".")
    file = _file(spec)
    is_package = last != "__main__" and file is not None and file.name == "__main__.py"
    return spec.target if is_package else parent


def names(node: ast.AST) -> list[str]:
    """Return the identifiers in a syntax-tree node itself, without those in its children."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.alias):
        return node.name.split(".")
    return (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else []


def _file(spec: LaunchSpec) -> Path | None:
    """Return the source file of the script or module in `spec`, without importing parent packages."""
    if spec.kind == "script":
        return Path(spec.target)
    if spec.kind != "module":
        return None
    found: ModuleSpec | None = None
    path: Sequence[str] = search_path(spec)
    try:
        for number, part in enumerate(spec.target.split(".")):
            # Search for the last part of the name only: a dotted name would import the parent packages.
            found = find(part, path) or (importlib.util.find_spec(part) if number == 0 else None)
            path = places(found)
    except _NOT_FOUND:
        return None
    if found is not None and found.submodule_search_locations is not None:
        found = find("__main__", path)
    return Path(found.origin) if found is not None and found.has_location and found.origin else None


def find(part: str, path: Sequence[str]) -> ModuleSpec | None:
    """Return the import spec of the module named `part` in the directories `path`; import nothing."""
    try:
        return PathFinder.find_spec(part, list(path))
    except _NOT_FOUND:
        return None


def places(found: ModuleSpec | None) -> tuple[str, ...]:
    """Return the directories that hold the modules of the package with import spec `found`.

    Returns an empty tuple for a module that is not a package.
    """
    return tuple((found and found.submodule_search_locations) or ())


def search_path(spec: LaunchSpec) -> tuple[str, ...]:
    """Return the workers' `sys.path`: as in the launcher, with the script's directory first."""
    if sys.flags.safe_path:
        return tuple(sys.path)
    directory = Path(spec.target).resolve().parent if spec.kind == "script" else Path.cwd()
    return (str(directory), *sys.path[1:])
