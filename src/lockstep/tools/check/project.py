"""Follow imports, calls and values through the Python files of a project, by their syntax trees."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

from lockstep.tools.check.source import Module, UnpackedElement, read
from lockstep.tools.check.syntax import Function, Scope, argument, method

#: Methods that return their object, changed in place or moved to another device.
_SAME = {
    *("to", "cuda", "cpu", "train", "eval", "float", "half", "bfloat16", "double"),
    "requires_grad_",
}
#: Methods of Accelerator and Fabric that return their arguments, prepared for several ranks.
_PREPARE = {"prepare", "setup", "setup_dataloaders"}
#: Number of assignments and calls through which a value is followed.
DEPTH = 8

#: An expression and the module that contains it.
Value = tuple[Module, ast.expr]


@dataclass(frozen=True)
class ProjectCall:
    """A call of a function of the project: its arguments by position (without `self`) and by keyword."""

    call: ast.Call
    positional: tuple[ast.expr | None, ...]
    keywords: dict[str, ast.expr]


class Project:
    """All parsed modules: the checked files, and the files of the same project that they import."""

    def __init__(self) -> None:
        self.modules: dict[Path, Module] = {}
        self._imported: dict[Module, list[Module]] = {}
        self._file = cache(_file)

    def load(self, path: Path) -> Module:
        """Parse a file, and the modules of the project that it imports; return the parsed file."""
        path = path.resolve()
        if path not in self.modules:
            module = self.modules[path] = read(path)
            found = {self._file(path.parent, name) for name in set(module.imports.values())}
            files = sorted(file for file in found if file is not None and file != path)
            self._imported[module] = [self.load(file) for file in files]
        return self.modules[path]

    @cached_property
    def programs(self) -> dict[Module, list[Module]]:
        """For each module, all modules of the programs that it is part of.

        A program is a file and the modules that it imports, directly or indirectly.
        """
        reached = {start: self._reach(start) for start in self.modules.values()}
        programs = {}
        for module in reached:
            parts = set().union(*(others for others in reached.values() if module in others))
            programs[module] = sorted(parts, key=lambda one: one.path)
        return programs

    def _reach(self, start: Module) -> set[Module]:
        found, left = {start}, [start]
        while left:
            new = set(self._imported.get(left.pop(), ())) - found
            found |= new
            left += new
        return found

    # Names ---------------------------------------------------------------------------------------

    def definition(self, module: Module, node: ast.AST) -> Function | ast.ClassDef | None:
        """Return the project's function or class that `node` names in `module`; `None` for another name."""
        match node:
            case ast.Name(id=name):
                own = module.free_functions.get(name) or module.classes.get(name)
                return own or self._imported_definition(module, name)
            case ast.Attribute(value=ast.Name(id="self"), attr=attr):
                return _method(module.enclosing_class(node), attr)
            case ast.Attribute(value=ast.Name(id=name), attr=attr) if name in module.imports:
                return self._imported_definition(module, name, f".{attr}")
            case ast.Attribute(value=value, attr=attr):
                return _method(self._class(module, value), attr)
        return None

    def _imported_definition(
        self, module: Module, name: str, attribute: str = ""
    ) -> Function | ast.ClassDef | None:
        if name not in module.imports:
            return None
        full = module.imports[name] + attribute
        file = self._file(module.path.parent, full)
        other = self.modules.get(file) if file else None
        if other is None or other is module:
            return None
        wanted = full.rpartition(".")[2]
        return other.free_functions.get(wanted) or other.classes.get(wanted)

    def _class(self, module: Module, node: ast.AST) -> ast.ClassDef | None:
        """Return the project's class of which the value of `node` is an instance; `None` if unknown."""
        values: list[ast.expr | UnpackedElement] = [node] if isinstance(node, ast.Call) else []
        if isinstance(node, ast.Name):
            values = module.bound.get((module.scope(node), node.id), [])
            values = values or module.bound.get((module.tree, node.id), [])
        elif isinstance(node, ast.Attribute):
            values = module.assigned(node)
        for value in values:
            if isinstance(value, ast.Call) and not isinstance(value.func, ast.Attribute):
                found = self.definition(module, value.func)
                if isinstance(found, ast.ClassDef):
                    return found
        return None

    def module_of(self, node: ast.AST) -> Module:
        """Return the module whose syntax tree contains `node`, such as a function or a class."""
        return next(module for module in self.modules.values() if node in module.parents)

    # Calls ---------------------------------------------------------------------------------------

    @cached_property
    def sites(self) -> dict[ast.AST, list[tuple[Module, ProjectCall]]]:
        """For each function of the project, the calls that run it, each with its module.

        `mp.spawn(f)` counts as a call of `f`.
        """
        found: dict[ast.AST, list[tuple[Module, ProjectCall]]] = defaultdict(list)
        for module in self.modules.values():
            for call in module.calls:
                called = self.definition(module, call.func)
                site = ProjectCall(
                    call, tuple(call.args), {k.arg: k.value for k in call.keywords if k.arg}
                )
                if module.name(call.func) in ("mp.spawn", "mp.start_processes"):
                    target, given = argument(call, "fn", 0), argument(call, "args", 1)
                    called = self.definition(module, target) if target is not None else None
                    elements = given.elts if isinstance(given, ast.Tuple) else ()
                    site = ProjectCall(call, (None, *elements), {})
                elif isinstance(called, ast.ClassDef):
                    called = _method(called, "__init__")
                if called is not None:
                    found[called].append((module, site))
        return found

    def callee(self, module: Module, call: ast.Call) -> Function | None:
        """Return the function that `call` in `module` runs, if the project defines it; else `None`."""
        called = self.definition(module, call.func)
        return called if isinstance(called, Function) else None

    # Values --------------------------------------------------------------------------------------

    def sources(self, module: Module, node: ast.expr) -> Iterator[Value]:
        """Yield the expressions from which `node` may get its value, each with its module.

        Names are followed to the values bound to them, parameters to the arguments of calls, calls of the
        project's functions to their return values. An expression that cannot be followed further is
        yielded.
        """
        yield from self._sources(module, node, DEPTH, set())

    def _sources(
        self, module: Module, node: ast.expr, depth: int, seen: set[ast.AST]
    ) -> Iterator[Value]:
        if depth == 0 or node in seen:
            return
        seen.add(node)
        values = self._next(module, node)
        if not values or isinstance(node, ast.Call):
            yield module, node
        for home, value in values:
            yield from self._sources(home, value, depth - 1, seen)

    def _next(self, module: Module, node: ast.expr) -> list[Value]:
        parts: list[ast.expr] = []
        match node:
            case ast.Name():
                return self._bindings(module, node)
            case ast.Attribute():
                return self._values(module, module.assigned(node))
            case ast.Call(func=ast.Attribute(attr=attr, value=value)) if attr in _SAME:
                parts = [value]
            case ast.Call():
                return self._returned(module, node)
            case ast.IfExp(body=body, orelse=orelse):
                parts = [body, orelse]
            case ast.BoolOp(values=values):
                parts = values
            case ast.NamedExpr(value=value) | ast.Await(value=value):
                parts = [value]
        return [(module, part) for part in parts]

    def _bindings(self, module: Module, node: ast.Name) -> list[Value]:
        scope: Scope = module.scope(node)
        while True:
            values = module.bound.get((scope, node.id), [])
            given = self.arguments(scope, node.id) if isinstance(scope, Function) else []
            if values or given or isinstance(scope, ast.Module):
                return self._values(module, values) + given
            scope = module.scope(scope)

    def _values(self, module: Module, values: Iterable[ast.expr | UnpackedElement]) -> list[Value]:
        found: list[Value] = []
        for value in values:
            found += (
                self.elements(module, value)
                if isinstance(value, UnpackedElement)
                else [(module, value)]
            )
        return found

    def elements(self, module: Module, part: UnpackedElement) -> list[Value]:
        """Return the possible values of `part`, such as of `model` in `model, data = make()`."""
        call, index = part.value, part.index
        if not isinstance(call, ast.Call):
            return []
        if method(call) in _PREPARE and index < len(call.args):
            return [(module, call.args[index]), (module, call)]
        return [
            (home, value.elts[index])
            for home, value in self._returned(module, call)
            if isinstance(value, ast.Tuple) and index < len(value.elts)
        ]

    def _returned(self, module: Module, call: ast.Call) -> list[Value]:
        called = self.callee(module, call)
        if called is None:
            return []
        home = self.module_of(called)
        return [
            (home, node.value)
            for node in ast.walk(called)
            if isinstance(node, ast.Return) and node.value and home.scope(node) is called
        ]

    def arguments(self, function: Function, name: str) -> list[Value]:
        """Return the arguments that calls of `function` pass for its parameter `name`, and the default."""
        spec = function.args
        names = [one.arg for one in (*spec.posonlyargs, *spec.args)]
        if name not in names and name not in [arg.arg for arg in spec.kwonlyargs]:
            return []
        method = bool(names) and names[0] in ("self", "cls")
        index = names.index(name) - method if name in names else -1
        found = []
        for module, site in self.sites.get(function, ()):
            given = site.keywords.get(name)
            if given is None and 0 <= index < len(site.positional):
                given = site.positional[index]
            if given is not None and not isinstance(given, ast.Starred):
                found.append((module, given))
        defaults = dict(zip(reversed(names), reversed(spec.defaults), strict=False))
        if name in defaults:
            found.append((self.module_of(function), defaults[name]))
        return found


def _file(directory: Path, name: str) -> Path | None:
    """Return the file of the project that modules in `directory` import as `name`, or `None`."""
    level = len(name) - len(name.lstrip("."))
    parents = [directory, *directory.parents]
    parts = name.strip(".").split(".")
    for base in parents[level - 1 : level] if level else parents[:4]:
        for cut in (len(parts), len(parts) - 1):
            path = base.joinpath(*parts[:cut])
            for file in (path.with_suffix(".py"), path / "__init__.py") if cut else ():
                if file.is_file():
                    return file.resolve()
    return None


def _method(owner: ast.ClassDef | None, name: str) -> Function | None:
    methods = [] if owner is None else [one for one in owner.body if isinstance(one, Function)]
    return next((method for method in methods if method.name == name), None)
