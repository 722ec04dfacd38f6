"""Find the imports at the top of a script, and whether it uses Lockstep, from its syntax tree.

The script is not run. The user's own modules are analyzed too, but only installed packages are listed. The
list ends before the first statement that may change the effect of a later import (`_may_change`).
"""

from __future__ import annotations

import ast
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from importlib.util import resolve_name
from pathlib import Path

import lockstep
from lockstep.launch.spec import LaunchSpec
from lockstep.launch.target import source

_PATHS = ("stdlib", "platstdlib", "purelib", "platlib")
#: Names of directories with installed packages.
_SITES = ("site-packages", "dist-packages")
#: Functions that set environment variables from a file.
_FROM_FILES = frozenset({"load_dotenv", "read_env"})
_ENVIRONMENT = frozenset({"environ", "environb", "putenv"})
_SETTING = frozenset({"putenv", "setdefault", "update"})
#: Beginnings of the names of variables that `torch._dynamo` reads at import.
_COMPILER = ("AOT", "CUTLASS", "INDUCTOR", "PARTITIONER", "SYMPY", "TORCH")
#: Functions that may change the effect of later imports. Some packages draw when they are imported.
_CHANGING = (_SETTING | _FROM_FILES) | {
    *("__import__", "chdir", "exec", "import_module", "run_path", "set_start_method"),
    *("seed", "seed_everything", "set_seed", "setstate"),
}
#: Modules of the standard library whose functions do not change later imports.
_HARMLESS = frozenset({"logging", "warnings"})
#: Functions and classes with which a script makes a process group or store itself.
_OF_GROUPS = frozenset({"TCPStore", "init_device_mesh", "init_process_group", "init_rpc"})
#: Names of functions, classes and packages by which the ranks of a training script share its work, or ask
#: for their rank.
_SHARING = _OF_GROUPS | {
    *("Accelerator", "Fabric", "Trainer", "environ", "get_rank", "getenv", "accelerate"),
    *("deepspeed", "horovod", "ignite", "lightning", "lockstep", "mpi4py", "pytorch_lightning"),
    *("ray", "transformers"),
}
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_IMPORTS = (ast.Import, ast.ImportFrom)
#: Maximum number of the user's own files that are analyzed for one script.
_FILES = 50


@dataclass(frozen=True, slots=True)
class Import:
    """A module that a script imports.

    Attributes:
        origin: file of the module's top-level package, as the script would import it.
        names: the names in `from module import names`.
    """

    module: str
    origin: str
    names: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """Name of the top-level package."""
        return self.module.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Sources:
    """Facts about a script and the user's modules that it imports, from their source.

    Attributes:
        imports: imports at the top that can be done before the script runs, in order.
        names: all identifiers, including those in functions.
        uses_lockstep: whether the script, or a user's module that it imports at its top, imports Lockstep.
        sets_compiler: whether the source may set a variable that `torch._dynamo` reads at import.
    """

    imports: tuple[Import, ...] = ()
    names: frozenset[str] = frozenset()
    uses_lockstep: bool = False
    sets_compiler: bool = False

    @property
    def leaves_groups_alone(self) -> bool:
        """Whether the source contains no name of a function that makes a process group or store."""
        return _OF_GROUPS.isdisjoint(self.names)

    @property
    def trains_alone(self) -> bool:
        """Whether each rank of the script would train by itself, as far as the source tells.

        It calls `backward`, and contains no name by which ranks share work or ask for their rank.
        """
        return "backward" in self.names and _SHARING.isdisjoint(self.names)


def read(spec: LaunchSpec) -> Sources:
    """Analyze the script or module of `spec`; return empty `Sources` if there is no source."""
    reader = _Reader(source.search_path(spec))
    package = source.package(spec)
    reader.follow(package, ())
    reader.read(source.parse(spec), package, is_main=True)
    uses_lockstep = reader.uses_lockstep
    for node, file in reader.later:  # `add` may append to the list
        reader.add(node, file)
    return Sources(
        tuple(reader.found), frozenset(reader.names), uses_lockstep, reader.sets_compiler
    )


@dataclass
class _File:
    """One source file during the analysis of a script's imports.

    Attributes:
        own: names of the user's functions, classes and modules in the file.
        installed: names imported from installed packages, whose calls do not change later imports.
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
        """Analyze a module of `package`, and the user's modules that it imports.

        `tree` is the syntax tree of the module, and `is_main` whether it is the script itself.
        """
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
            # Imports inside another statement may not run: analyze their effects, but do not list them.
            known = len(self.found)
            for inner in running:
                if isinstance(inner, _IMPORTS):
                    self.add(inner, file)
            if not isinstance(node, _IMPORTS):
                del self.found[known:]

    def add(self, node: ast.Import | ast.ImportFrom, file: _File) -> None:
        """Handle the import statement `node` of `file`: list installed packages, analyze user modules."""
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
        """Return the file of a package; `None` for a missing or namespace package."""
        self.uses_lockstep |= package == "lockstep"
        if package in sys.builtin_module_names:
            return "built-in"
        spec = source.find(package, self.path)
        return None if spec is None else spec.origin

    def follow(self, module: str, names: tuple[str, ...]) -> None:
        """Analyze a module of the user in import order: parent packages, the module, submodules `names`."""
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
        else:  # unread files may have any effect
            self.has_ended = self.sets_compiler = True


def _absolute(node: ast.ImportFrom, parent: str) -> str:
    """Return the absolute module name of a `from … import` in package `parent`; `""` if invalid."""
    try:
        return resolve_name("." * node.level + (node.module or ""), parent)
    except ImportError:  # above the top-level package
        return ""


def _is_installed(origin: str) -> bool:
    """Whether a file belongs to the standard library, an installed package or Lockstep."""
    own = Path(lockstep.__file__).resolve().parent
    places = (*(sysconfig.get_path(name) + os.sep for name in _PATHS), f"{own}{os.sep}")
    return (
        origin in ("built-in", "frozen")
        or origin.startswith(places)
        or any(f"{os.sep}{name}{os.sep}" in origin for name in _SITES)
    )


def _running(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a statement, except function bodies, which do not run at import."""
    todo = [node]
    while todo:  # no recursion: syntax trees can be thousands of levels deep
        node = todo.pop()
        yield node
        later = set(node.body) if isinstance(node, _FUNCTIONS) else ()
        todo += [one for one in reversed(list(ast.iter_child_nodes(node))) if one not in later]


def _may_change(node: ast.AST, file: _File) -> bool:
    """Whether `node` may change later imports, such as `os.environ[…] = …` or `sys.path.insert(…)`.

    Such nodes are calls of the user's functions, assignments to attributes and items, and calls whose
    result is unused. Assignments to parts of installed packages, and unused calls of their functions, are
    taken as harmless. `file` lists which names are the user's and which are from installed packages.
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
    """Whether a node may set an environment variable that `torch._dynamo` reads at import."""
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
    """Return the first name of an expression, such as `a` in `a.b[0].c()`; `""` if there is none."""
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""
