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


def parse(spec: LaunchSpec) -> ast.Module:
    """Return the tree of what `spec` runs; an empty one where it cannot be found or parsed."""
    return _parse(_read(spec) or b"")


def parse_file(file: Path) -> ast.Module:
    """Return the tree of a file; an empty one where it cannot be read or parsed."""
    try:
        return _tree(file.read_bytes())
    except OSError:
        return _tree(b"")


@functools.lru_cache(maxsize=1)  # a launch asks several times
def _parse(text: bytes) -> ast.Module:
    return _tree(text)


def _tree(text: bytes) -> ast.Module:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the worker compiles it again, and warns
            return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ast.Module(body=[], type_ignores=[])


def package(spec: LaunchSpec) -> str:
    """Return the package whose module `spec` runs, which is imported first; `""` where there is none."""
    if spec.kind != "module":
        return ""
    parent, _, last = spec.target.rpartition(".")
    try:
        file = _module_file(spec.target, search_path(spec))
    except (OSError, ImportError, ValueError):
        file = None
    is_package = last != "__main__" and file is not None and file.name == "__main__.py"
    return spec.target if is_package else parent


def said(node: ast.AST) -> list[str]:
    """Return the names that a node itself says."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute):
        return [node.attr]
    if isinstance(node, ast.alias):
        return node.name.split(".")
    return (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else []


def _read(spec: LaunchSpec) -> bytes | None:
    if spec.kind in ("function", "program"):
        return None
    try:
        file = (
            Path(spec.target)
            if spec.kind == "script"
            else _module_file(spec.target, search_path(spec))
        )
        return None if file is None else file.read_bytes()
    except (OSError, ImportError, ValueError):
        return None


def _module_file(name: str, path: Sequence[str]) -> Path | None:
    """Return the file that `python -m name` runs, without importing the packages that hold it."""
    found: ModuleSpec | None = None
    for number, part in enumerate(name.split(".")):
        # The part alone is asked for, even inside a package: a dotted name would need its parents imported.
        found = find(part, path) or (importlib.util.find_spec(part) if number == 0 else None)
        path = places(found)
    if found is not None and found.submodule_search_locations is not None:
        found = find("__main__", path)
    return Path(found.origin) if found is not None and found.has_location and found.origin else None


def find(part: str, path: Sequence[str]) -> ModuleSpec | None:
    """Return where `path` has a module, by the last part of its name: nothing is imported."""
    try:
        return PathFinder.find_spec(part, list(path))
    except (ImportError, ValueError, OSError):
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
