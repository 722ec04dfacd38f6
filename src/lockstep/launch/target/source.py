"""Source of a script or a module, read and parsed without importing or running it."""

from __future__ import annotations

import ast
import functools
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from lockstep.launch.spec import LaunchSpec

#: What an attempt to find a module may raise, beside not finding it.
_NOT_FOUND = (OSError, ImportError, ValueError)


def parse(spec: LaunchSpec) -> ast.Module:
    """Return the tree of what `spec` runs; an empty one where it cannot be found or parsed."""
    return _parse_script(_read(_file(spec)))


def parse_file(file: Path) -> ast.Module:
    """Return the tree of a file; an empty one where it cannot be read or parsed."""
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


_parse_script = functools.lru_cache(maxsize=1)(_parse)  # a launch asks several times


def package(spec: LaunchSpec) -> str:
    """Return the package whose module `spec` runs, which is imported first; `""` where there is none."""
    if spec.kind != "module":
        return ""
    parent, _, last = spec.target.rpartition(".")
    file = _file(spec)
    is_package = last != "__main__" and file is not None and file.name == "__main__.py"
    return spec.target if is_package else parent


def names(node: ast.AST) -> list[str]:
    """Return the names in a node itself, without its children."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.alias):
        return node.name.split(".")
    return (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else []


def _file(spec: LaunchSpec) -> Path | None:
    """Return the file that `spec` runs, without importing the packages that hold it."""
    if spec.kind == "script":
        return Path(spec.target)
    if spec.kind != "module":
        return None
    found: ModuleSpec | None = None
    path: Sequence[str] = search_path(spec)
    try:
        for number, part in enumerate(spec.target.split(".")):
            # The part alone is searched, even inside a package: a dotted name would import its parents.
            found = find(part, path) or (importlib.util.find_spec(part) if number == 0 else None)
            path = places(found)
    except _NOT_FOUND:
        return None
    if found is not None and found.submodule_search_locations is not None:
        found = find("__main__", path)
    return Path(found.origin) if found is not None and found.has_location and found.origin else None


def find(part: str, path: Sequence[str]) -> ModuleSpec | None:
    """Return where `path` has a module, by the last part of its name: nothing is imported."""
    try:
        return PathFinder.find_spec(part, list(path))
    except _NOT_FOUND:
        return None


def places(found: ModuleSpec | None) -> tuple[str, ...]:
    """Return the directories that the modules of a package are in; none where `found` is no package."""
    return tuple((found and found.submodule_search_locations) or ())


def search_path(spec: LaunchSpec) -> tuple[str, ...]:
    """Return the `sys.path` of the workers of `spec`: the script's directory replaces ours."""
    if sys.flags.safe_path:
        return tuple(sys.path)
    directory = Path(spec.target).resolve().parent if spec.kind == "script" else Path.cwd()
    return (str(directory), *sys.path[1:])
