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
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
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
    script = Path(spec.target).parent if spec.kind == "script" else Path.cwd()
    reader = _Reader((str(script), *sys.path[1:]))
    try:
        return tuple(reader.read(source.parse(spec), is_main=True))
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

    def read(self, tree: ast.Module, *, is_main: bool = False) -> list[Import]:
        """Return what a module and the user's modules that it imports have at their tops."""
        for node in _statements(tree.body, is_main=is_main):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    self._add(alias.name, ())
            elif isinstance(node, ast.ImportFrom):
                if node.level == 0 and node.module:
                    self._add(node.module, tuple(a.name for a in node.names if a.name != "*"))
            elif any(_CHANGING.intersection(source.said(one)) for one in ast.walk(node)):
                raise _ChangeError(tuple(self.found))
        return self.found

    def _add(self, module: str, names: tuple[str, ...]) -> None:
        package = module.partition(".")[0]
        origin = _origin(package, self.path)
        if origin is None:
            return
        if _is_installed(origin):
            self.found.append(Import(module, origin, names))
        elif origin not in self.seen and len(self.seen) < _FILES:
            self.seen.add(origin)
            self.read(source.parse_file(Path(origin)))


def _origin(package: str, path: tuple[str, ...]) -> str | None:
    if package in sys.builtin_module_names:
        return "built-in"
    try:
        spec = PathFinder.find_spec(package, list(path))
    except (ImportError, ValueError, OSError):
        return None
    return None if spec is None else spec.origin


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
