"""Imports at the top of a script, and whether it uses Lockstep, read from its source.

Nothing of it is run. Modules of the user's own are followed, not listed: the worker imports them. The list
ends before the first statement that may change what a later import does (`_may_change`).
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path

import lockstep
from lockstep.launch.spec import LaunchSpec
from lockstep.launch.target import source

_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")
#: Directories of installed packages, wherever they are: of a user, of a distribution, say.
_SITES = ("site-packages", "dist-packages")
#: Functions that set variables of the environment from a file.
_FROM_FILES = frozenset({"load_dotenv", "read_env"})
_ENVIRONMENT = frozenset({"environ", "environb", "putenv"})
_SETTING = frozenset({"putenv", "setdefault", "update"})
#: How the variables begin that `torch._dynamo` reads when it is imported.
_COMPILER = ("AOT", "CUTLASS", "INDUCTOR", "PARTITIONER", "SYMPY", "TORCH")
#: Functions after which an import may do something else, also where their result is assigned.
_CHANGING = (_SETTING | _FROM_FILES) | {
    *("__import__", "chdir", "exec", "import_module", "run_path", "set_start_method"),
    *(
        "seed",
        "seed_everything",
        "set_seed",
        "setstate",
    ),  # some packages draw when they are imported
}
#: Modules of the standard library whose functions leave imports alone.
_HARMLESS = frozenset({"logging", "warnings"})
#: What makes a process group, or a store, of the script's own.
_OF_GROUPS = frozenset({"TCPStore", "init_device_mesh", "init_process_group", "init_rpc"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
#: Files of the user's own that are read for one script.
_FILES = 50


@dataclass(frozen=True, slots=True)
class Import:
    """One import statement for one module.

    Attributes:
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


@dataclass(frozen=True, slots=True)
class Sources:
    """Facts from the sources of a script and of the user's modules that it imports.

    Attributes:
        imports: what is imported before anything may change what an import does, in order.
        names: names, attributes and parts of imports, in functions, too.
        uses_lockstep: whether they import Lockstep: then the script is expected to make a run. What
            functions import counts in the script alone: those of a module may never be called.
        sets_compiler: whether they may set a variable that `torch._dynamo` reads when it is imported.
    """

    imports: tuple[Import, ...] = ()
    names: frozenset[str] = frozenset()
    uses_lockstep: bool = False
    sets_compiler: bool = False

    @property
    def leaves_groups_alone(self) -> bool:
        """Whether they make no process group by themselves, as far as they can be read."""
        return _OF_GROUPS.isdisjoint(self.names)


def read(spec: LaunchSpec) -> Sources:
    """Return the facts from the sources of `spec`; none where it has no source."""
    reader = _Reader(source.search_path(spec))
    package = source.package(spec)
    reader.follow(package, ())
    reader.read(source.parse(spec), package, is_main=True)
    uses_lockstep = reader.uses_lockstep
    for node, file in reader.later:  # reading one may add to them
        reader.add(node, file)
    return Sources(
        tuple(reader.found), frozenset(reader.names), uses_lockstep, reader.sets_compiler
    )


@dataclass
class _File:
    """A file that is read.

    Attributes:
        own: names of the user's own functions, classes and modules.
        installed: names from installed packages, which leave other imports alone.
    """

    package: str
    is_main: bool
    own: set[str]
    installed: set[str] = field(default_factory=set)


@dataclass
class _Reader:
    path: tuple[str, ...]
    found: list[Import] = field(default_factory=list)
    later: list[tuple[ast.Import | ast.ImportFrom, _File]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)
    has_ended: bool = False
    uses_lockstep: bool = False
    sets_compiler: bool = False

    def read(self, tree: ast.Module, package: str, *, is_main: bool = False) -> None:
        """Read a module of `package` and the user's modules that it imports."""
        nodes = list(ast.walk(tree))
        names = {name for node in nodes for name in source.names(node)}
        self.names |= names
        self.sets_compiler |= not _FROM_FILES.isdisjoint(names) or any(map(_sets_compiler, nodes))
        own = {node.name for node in tree.body if isinstance(node, (*_FUNCTIONS, ast.ClassDef))}
        file = _File(package, is_main, own)
        self._read_body(tree.body, file)
        inner = [node for one in nodes if isinstance(one, _FUNCTIONS) for node in ast.walk(one)]
        later = [(node, file) for node in inner if isinstance(node, _IMPORTS)]
        if not is_main:
            self.later += later
            return
        self.has_ended = True
        for one in later:
            self.add(*one)

    def _read_body(self, body: list[ast.stmt], file: _File) -> None:
        for node in body:
            if isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'":
                self._read_body(node.body if file.is_main else node.orelse, file)
                continue
            running = list(_running(node))
            self.has_ended |= any(_may_change(one, file) for one in running)
            if isinstance(node, ast.Try):
                self._read_body(node.body, file)
            # Imports inside of another statement may not happen: what they change counts, and what they
            # import does not.
            known = len(self.found)
            for inner in running:
                if isinstance(inner, _IMPORTS):
                    self.add(inner, file)
            if not isinstance(node, _IMPORTS):
                del self.found[known:]

    def add(self, node: ast.Import | ast.ImportFrom, file: _File) -> None:
        """Add what a statement of `file` imports, or follow it."""
        taken: dict[str, tuple[str, ...]] = {alias.name: () for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            module = _absolute(node, file.package)
            taken = {module: tuple(a.name for a in node.names if a.name != "*")} if module else {}
        bound = {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        for name, names in taken.items():
            package = name.partition(".")[0]
            origin = self._origin(package)
            if origin is None or not _is_installed(origin):
                self.follow(name, names)
                file.own |= bound
                continue
            if package in _HARMLESS or package not in sys.stdlib_module_names:
                file.installed |= bound
            if not self.has_ended:
                self.found.append(Import(name, origin, names))

    def _origin(self, package: str) -> str | None:
        """Return the file of a package; `None` where there is none, as for a namespace package."""
        self.uses_lockstep |= package == "lockstep"
        if package in sys.builtin_module_names:
            return "built-in"
        spec = source.find(package, self.path)
        return None if spec is None else spec.origin

    def follow(self, module: str, names: tuple[str, ...]) -> None:
        """Read a module of the user's own in the order of its import: parents, itself, `names` in it."""
        package, path = "", self.path
        for part in filter(None, module.split(".")):
            spec = source.find(part, path)
            if spec is None:
                return
            parent, package = package, f"{package}.{part}".lstrip(".")
            path = source.places(spec)
            self._read_file(spec, package if path else parent)
        for name in names:
            if spec := source.find(name, path):
                is_package = bool(spec.submodule_search_locations)
                self._read_file(spec, f"{package}.{name}" if is_package else package)

    def _read_file(self, spec: ModuleSpec, parent: str) -> None:
        origin = spec.origin
        if origin is None or _is_installed(origin) or origin in self.seen:
            return
        if len(self.seen) < _FILES:
            self.seen.add(origin)
            self.read(source.parse_file(Path(origin)), parent)
        else:  # what it changes is not known
            self.has_ended = self.sets_compiler = True


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
    own = Path(lockstep.__file__).resolve().parent
    places = (*(sysconfig.get_path(name) + os.sep for name in _PATHS), f"{own}{os.sep}")
    return (
        origin in ("built-in", "frozen")
        or origin.startswith(places)
        or any(f"{os.sep}{name}{os.sep}" in origin for name in _SITES)
    )


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a statement's nodes, of functions in it decorators, default values and annotations alone."""
    todo = [node]
    while todo:  # no recursion: a sum of a thousand texts is a thousand levels deep
        node = todo.pop()
        yield node
        later = set(node.body) if isinstance(node, _FUNCTIONS) else ()
        todo += [one for one in reversed(list(ast.iter_child_nodes(node))) if one not in later]


def _may_change(node: ast.AST, file: _File) -> bool:
    """Whether a node may change what a later import does: `os.environ[…] = …`, `sys.path.insert(…)`.

    A node that stores or deletes an attribute or an item may, a bare call, both except for those of
    installed packages, and a call of the user's own.
    """
    match node:
        case ast.Attribute() | ast.Subscript():
            return not isinstance(node.ctx, ast.Load) and _root(node) not in file.installed
        case ast.Expr(ast.Call() as call):
            return _root(call) not in (*file.installed, "print")
        case ast.Call(func):
            return _root(node) in file.own or not _CHANGING.isdisjoint(source.names(func))
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return any(_root(one) in file.own for one in node.decorator_list)
    return False


def _sets_compiler(node: ast.AST) -> bool:
    """Whether a node sets a variable that `torch._dynamo` reads, or one whose name is computed."""
    match node:
        case ast.Subscript(of, given, ast.Store()):
            keys = [given]
        case ast.AugAssign(of, value=given):
            keys = [given]
        case ast.Call(of, args, words) if not _SETTING.isdisjoint(source.names(of)):
            keys = [*args[:1], *(ast.Constant(one.arg) if one.arg else one.value for one in words)]
        case _:
            return False
    names = [name for one in keys for name in (one.keys if isinstance(one, ast.Dict) else [one])]
    texts = [str(name.value) for name in names if isinstance(name, ast.Constant)]
    is_environment = not _ENVIRONMENT.isdisjoint(
        [*source.names(of), *source.names(getattr(of, "value", of))]
    )
    is_data = len(texts) < len(names)
    return any(text.startswith(_COMPILER) for text in texts) or (is_environment and is_data)


def _root(node: ast.expr) -> str:
    """Return the name that a call, an attribute or an item begins with."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
