"""What a script imports at its top, of the standard library and of installed packages.

Read from its source, and nothing of it is run. Modules of the user's own are followed, not named: the
worker imports them. The list ends before the first statement that may change what an import does: one that
says `environ` or `sys.path`, for example.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from lockstep.launch import source
from lockstep.launch.spec import LaunchSpec

_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")
#: Directories of installed packages, wherever they are: of a user, of a distribution, say.
_SITES = ("site-packages", "dist-packages")
#: Names after which an import may do something else than before.
_CHANGING = frozenset({"environ", "putenv", "environb", "path", "load_dotenv", "set_start_method"})
#: Files of the user's own that are read for one script.
_FILES = 50


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement for one module.

    Attributes:
        module: its full name.
        origin: the file that its package came from where the script is.
        names: what is taken from it, as in `from module import names`.
    """

    module: str
    origin: str
    names: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """The package that the module is in."""
        return self.module.partition(".")[0]


def at_the_top(spec: LaunchSpec) -> tuple[Import, ...]:
    """Return what `spec` imports first, in order; nothing where it has no source."""
    is_script = spec.kind == "script"
    directory = Path(spec.target).parent if is_script else Path.cwd()
    reader = _Reader((str(directory), *sys.path[1:]))
    package = spec.target.rpartition(".")[0] if spec.kind == "module" else ""
    try:
        reader.follow(package, ())
        return tuple(reader.read(source.parse(spec), package, is_main=True))
    except _ChangeError as change:
        return change.before


class _ChangeError(Exception):
    """A statement may change what later imports do."""

    def __init__(self, before: tuple[Import, ...] = ()) -> None:
        super().__init__()
        self.before = before


@dataclass
class _Reader:
    path: tuple[str, ...]
    found: list[Import] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)

    def read(self, tree: ast.Module, parent: str, *, is_main: bool = False) -> list[Import]:
        """Return what a module of the package `parent` and the user's modules that it imports import."""
        for node in _statements(tree.body, is_main=is_main):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._add(alias.name, ())
            elif isinstance(node, ast.ImportFrom):
                if module := _absolute(node, parent):
                    self._add(module, tuple(a.name for a in node.names if a.name != "*"))
            elif any(_CHANGING.intersection(source.said(one)) for one in ast.walk(node)):
                raise _ChangeError(tuple(self.found))
        return self.found

    def _add(self, module: str, names: tuple[str, ...]) -> None:
        package = module.partition(".")[0]
        if package in sys.builtin_module_names:
            self.found.append(Import(module, "built-in", names))
        elif (spec := _find(package, self.path)) is not None:
            # A namespace package has no origin.
            if spec.origin is not None and _is_installed(spec.origin):
                self.found.append(Import(module, spec.origin, names))
            else:
                self.follow(module, names)

    def follow(self, module: str, names: tuple[str, ...]) -> None:
        """Read a module of the user's own in the order of its import: parents, itself, `names` in it."""
        package, path = "", self.path
        for part in filter(None, module.split(".")):
            spec = _find(part, path)
            if spec is None:
                return
            parent, package = package, f"{package}.{part}".lstrip(".")
            path = tuple(spec.submodule_search_locations or ())
            self._read_file(spec, package if path else parent)
        for name in names:
            if spec := _find(name, path):
                is_package = bool(spec.submodule_search_locations)
                self._read_file(spec, f"{package}.{name}" if is_package else package)

    def _read_file(self, spec: ModuleSpec, parent: str) -> None:
        origin = spec.origin
        if origin is None or _is_installed(origin) or origin in self.seen:
            return
        if len(self.seen) < _FILES:
            self.seen.add(origin)
            self.read(source.parse_file(Path(origin)), parent)


def _find(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """Return where `path` has a module, by the last part of its name: nothing is imported."""
    try:
        return PathFinder.find_spec(name, list(path))
    except (ImportError, ValueError, OSError):
        return None


def _absolute(node: ast.ImportFrom, parent: str) -> str:
    """Return the full name of the module that is imported from; `""` where it has none."""
    if not node.level:
        return node.module or ""
    above = parent.split(".") if parent else []
    if node.level > len(above):
        return ""
    return ".".join([*above[: len(above) - node.level + 1], *filter(None, [node.module])])


def _is_installed(origin: str) -> bool:
    """Whether a module is of the standard library, an installed package, or this one."""
    own = Path(__file__).resolve().parents[1]
    places = (*(sysconfig.get_path(name) + os.sep for name in _PATHS), f"{own}{os.sep}")
    return (
        origin in ("built-in", "frozen")
        or origin.startswith(places)
        or any(f"{os.sep}{name}{os.sep}" in origin for name in _SITES)
    )


def _statements(body: list[ast.stmt], *, is_main: bool) -> Iterator[ast.stmt]:
    """Yield what runs when a module is imported or run, as far as that is sure."""
    for node in body:
        if isinstance(node, ast.Try):
            yield from _statements(node.body, is_main=is_main)
        elif isinstance(node, ast.If) and _asks_for_main(node.test):
            yield from _statements(node.body if is_main else [], is_main=is_main)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.If):
            yield node


def _asks_for_main(test: ast.expr) -> bool:
    return any("__name__" in source.said(node) for node in ast.walk(test))
