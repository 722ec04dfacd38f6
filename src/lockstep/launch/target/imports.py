"""Imports at the top of a script, and whether it uses Lockstep, read from its source.

Nothing of it is run. Modules of the user's own are followed, not named: the worker imports them. The list
of imports ends before the first statement that may change what an import does: it sets a variable of the
environment or changes `sys.path`, for example, or calls a function of the user's own. It also ends before a
seed of Python's generator, which some packages draw from when they are imported.
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from pathlib import Path

import lockstep
from lockstep.launch.spec import LaunchSpec
from lockstep.launch.target import source

_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")
#: Directories of installed packages, wherever they are: of a user, of a distribution, say.
_SITES = ("site-packages", "dist-packages")
#: What changes the environment; other names after which an import may do something else than before.
_FROM_FILES = frozenset({"load_dotenv", "read_env"})
_ENVIRONMENT = _FROM_FILES | {"environ", "environb", "putenv", "unsetenv"}
_SETTING = frozenset({"putenv", "setdefault", "update"})
#: How the variables begin that `torch._dynamo` reads when it is imported.
_COMPILER = ("AOT", "CUTLASS", "INDUCTOR", "PARTITIONER", "SYMPY", "TORCH")
_CHANGING = _ENVIRONMENT | frozenset(
    {"addsitedir", "chdir", "exec", "meta_path", "path_hooks", "run_path", "set_start_method"}
    | {"__import__", "import_module", "sys.argv", "sys.path", "modules[]"}
)
#: What seeds Python's generator when it is called.
_SEEDING = frozenset({"seed", "seed_everything", "set_seed", "setstate"})
#: What makes a process group, or a store, of the script's own.
_OF_GROUPS = frozenset({"TCPStore", "init_device_mesh", "init_process_group", "init_rpc"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
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


@dataclass(frozen=True, slots=True)
class Sources:
    """What the sources of a script and of the user's modules that it imports say, in functions, too.

    Attributes:
        imports: what is imported before anything may change what an import does, in order.
        names: names, attributes and parts of imports.
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
    """Return what the sources of `spec` say; nothing where it has none."""
    reader = _Reader(source.search_path(spec))
    package = source.package(spec)
    reader.follow(package, ())
    reader.read(source.parse(spec), package, is_main=True)
    uses_lockstep = reader.uses_lockstep
    for node, file in reader.later:  # reading one may add to them
        reader.add(node, file)
    return Sources(
        tuple(reader.found),
        frozenset(reader.names),
        uses_lockstep,
        reader.sets_environment and reader.names_compiler,
    )


@dataclass
class _File:
    """A file that is read: its package, whether it is the script, and the names that are the user's own."""

    package: str
    is_main: bool
    own: set[str]


@dataclass
class _Reader:
    path: tuple[str, ...]
    found: list[Import] = field(default_factory=list)
    later: list[tuple[ast.Import | ast.ImportFrom, _File]] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    seen: set[str] = field(default_factory=set)
    has_ended: bool = False
    may_change: bool = False  # in a function of the user's own
    uses_lockstep: bool = False
    sets_environment: bool = False
    names_compiler: bool = False

    def read(self, tree: ast.Module, package: str, *, is_main: bool = False) -> None:
        """Read a module of `package` and the user's modules that it imports."""
        nodes = list(ast.walk(tree))
        words = set(_words(nodes))
        self.names.update(name for node in nodes for name in source.said(node))
        self.sets_environment |= not _ENVIRONMENT.isdisjoint(words)
        # A file that is loaded may name any variable.
        self.names_compiler |= not _FROM_FILES.isdisjoint(words) or any(
            _is_of_compiler(node) or _sets_any_variable(node) for node in nodes
        )
        self.may_change |= not _CHANGING.isdisjoint(words)
        own = {node.name for node in tree.body if isinstance(node, (*_FUNCTIONS, ast.ClassDef))}
        file = _File(package, is_main, own)
        self._read_body(tree.body, file)
        inner = [node for one in nodes if isinstance(one, _FUNCTIONS) for node in ast.walk(one)]
        later = [(node, file) for node in inner if isinstance(node, ast.Import | ast.ImportFrom)]
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
            else:
                self._read_statement(node, file)

    def _read_statement(self, node: ast.stmt, file: _File) -> None:
        self.has_ended |= self._changes(list(_running(node)), file.own)
        if isinstance(node, ast.Import | ast.ImportFrom):
            self.add(node, file)
            return
        if isinstance(node, ast.Try):
            self._read_body(node.body, file)
        # Other imports in it may not happen: what they change counts, and what they import does not.
        known = len(self.found)
        for inner in _running(node):
            if isinstance(inner, ast.Import | ast.ImportFrom):
                self.add(inner, file)
        del self.found[known:]

    def _changes(self, nodes: list[ast.AST], own: set[str]) -> bool:
        bare = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        calls: set[ast.expr] = {node for node in nodes if isinstance(node, ast.Call)}
        calls.update(one for node in nodes for one in getattr(node, "decorator_list", ()))
        called = {name for call in calls for name in source.said(getattr(call, "func", call))}
        return (
            not _CHANGING.isdisjoint(_words(nodes))
            or not _SEEDING.isdisjoint(called)
            or any(self.may_change or id(call) in bare for call in calls if _root(call) in own)
        )

    def add(self, node: ast.Import | ast.ImportFrom, file: _File) -> None:
        """Add what a statement of `file` imports, or follow it."""
        taken: dict[str, tuple[str, ...]] = {alias.name: () for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            module = _absolute(node, file.package)
            taken = {module: tuple(a.name for a in node.names if a.name != "*")} if module else {}
        for name, names in taken.items():
            if self._add(name, names):
                file.own.update((a.asname or a.name).partition(".")[0] for a in node.names)

    def _add(self, module: str, names: tuple[str, ...]) -> bool:
        """Add a module, or follow it; return whether it may be the user's own."""
        package = module.partition(".")[0]
        self.uses_lockstep |= package == "lockstep"
        is_builtin = package in sys.builtin_module_names
        spec = None if is_builtin else source.find(package, self.path)
        # A namespace package has no origin.
        origin = "built-in" if is_builtin else (spec.origin if spec is not None else None)
        if origin is None or not _is_installed(origin):
            self.follow(module, names)
            return True
        if not self.has_ended:
            self.found.append(Import(module, origin, names))
        return False

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
            self.has_ended = self.sets_environment = self.names_compiler = True


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
    yield node
    later = set(node.body) if isinstance(node, _FUNCTIONS) else ()
    for child in ast.iter_child_nodes(node):
        if child not in later:
            yield from _running(child)


def _words(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that `nodes` say, without those of which they only read an item."""
    said = list(nodes)
    read = {id(n.value) for n in said if isinstance(n, ast.Subscript | ast.Attribute) and _reads(n)}
    for node in said:
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.alias):
            if node.asname is not None:  # a name that is not known further down
                yield from ("sys.path" if node.name == "sys" else node.name,)
        elif id(node) not in read:
            yield from source.said(node)
            if isinstance(node, ast.Attribute):
                yield from (f"{name}.{node.attr}" for name in source.said(node.value))
            elif isinstance(node, ast.Subscript) and not _reads(node):
                yield from (f"{name}[]" for name in source.said(node.value))


def _is_of_compiler(node: ast.AST) -> bool:
    """Whether a node is a text, or a keyword of a call, that begins as variables of the compiler do."""
    text = node.value if isinstance(node, ast.Constant) else getattr(node, "arg", None)
    return isinstance(text, str) and text.startswith(_COMPILER)


def _sets_any_variable(node: ast.AST) -> bool:
    """Whether a node sets variables of the environment whose names are data: `environ[name] = value`."""
    match node:
        case ast.Subscript(of, given, ast.Store()):
            keys = [given]
        case ast.AugAssign(of, value=given):
            keys = [given]
        case ast.Call(of, args, keywords) if not _SETTING.isdisjoint(source.said(of)):
            keys = [*args[:1], *(one.value for one in keywords if one.arg is None)]
        case _:
            return False
    names = [name for one in keys for name in (one.keys if isinstance(one, ast.Dict) else [one])]
    is_data = not all(isinstance(name, ast.Constant) for name in names)
    return is_data and not _ENVIRONMENT.isdisjoint(_words([of, getattr(of, "value", of)]))


def _reads(node: ast.Subscript | ast.Attribute) -> bool:
    """Whether a node reads an item: `environ["A"]`, `environ.get`."""
    is_item = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
    return is_item or (isinstance(node, ast.Attribute) and node.attr == "get")


def _root(node: ast.expr) -> str:
    """Return the name that a call, an attribute or an item begins with."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
