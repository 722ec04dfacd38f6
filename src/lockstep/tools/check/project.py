"""Analysis over several files: imports, calls, and origins of values."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lockstep.tools.check.source import Function, Module, Part, Scope, dotted, read

#: What is imported under several names, and the one that rules use.
_SHORT = {
    "torch.nn.parallel.DistributedDataParallel": "DDP",
    "torch.nn.parallel.distributed.DistributedDataParallel": "DDP",
    "torch.nn.DataParallel": "DataParallel",
    "torch.nn.parallel.DataParallel": "DataParallel",
    "torch.nn.modules.batchnorm.SyncBatchNorm": "torch.nn.SyncBatchNorm",
    "torch.utils.data.dataloader.DataLoader": "DataLoader",
    "torch.utils.data.DataLoader": "DataLoader",
    "torch.utils.data.DistributedSampler": "DistributedSampler",
    "torch.utils.data.distributed.DistributedSampler": "DistributedSampler",
    "torch.utils.data.dataset.random_split": "torch.utils.data.random_split",
    "torch.distributed.fsdp.FullyShardedDataParallel": "FSDP",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "FSDP",
    "torch.distributed.fsdp.fully_shard": "fully_shard",
    "torch.distributed._composable.fsdp.fully_shard": "fully_shard",
    "accelerate.Accelerator": "Accelerator",
    "lightning.Fabric": "Fabric",
    "lightning.fabric.Fabric": "Fabric",
    "lightning_fabric.Fabric": "Fabric",
}
_PREFIXES = {
    "torch.distributed.distributed_c10d.": "dist.",
    "torch.distributed.": "dist.",
    "torch.multiprocessing.": "mp.",
    "torch.multiprocessing.spawn.": "mp.",
    "multiprocessing.": "mp.",
}
#: Methods that hand back what they were given, changed in place or moved.
_SAME = {
    "to",
    "cuda",
    "cpu",
    "train",
    "eval",
    "float",
    "half",
    "bfloat16",
    "requires_grad_",
    "double",
}
#: Methods of Accelerator and Fabric that return their arguments, ready for several ranks.
_PREPARE = {"prepare", "setup", "setup_dataloaders"}
#: How far values and calls are followed.
DEPTH = 8


@dataclass(frozen=True)
class Site:
    """A call of a function of the project: the arguments by position, from the first after `self`."""

    call: ast.Call
    positional: tuple[ast.expr | None, ...]
    keywords: dict[str, ast.expr]


class Project:
    """The files that were asked for, and those of the project that they import."""

    def __init__(self) -> None:
        self.modules: dict[Path, Module] = {}
        self._paths: dict[Module, Path] = {}
        self._imported: dict[Path, list[Module]] = {}
        self._programs: dict[Path, list[Module]] = {}
        self._matches: dict[tuple[Module, str], list[str]] = {}
        self._named: dict[Module, dict[str, list[ast.Call]]] = {}
        self._called: dict[Module, set[str]] = {}
        self._found: dict[tuple[Path, str], Path | None] = {}

    def load(self, path: Path) -> Module:
        """Return a file and all that it imports of the project, each read once."""
        path = path.resolve()
        if path in self.modules:
            return self.modules[path]
        module = self.modules[path] = read(path)
        self._paths[module] = path
        found = (self._find(module, name) for name in set(module.imports.values()))
        files = {file for file in found if file is not None and file != path}
        self._imported[path] = [self.load(file) for file in sorted(files)]
        return module

    def _find(self, module: Module, name: str) -> Path | None:
        key = module.path.parent, name
        if key not in self._found:
            self._found[key] = self._search(module, name)
        return self._found[key]

    def _search(self, module: Module, name: str) -> Path | None:
        """Return the file of the project that an import takes `name` from."""
        above = module.path.resolve().parent
        dots = len(name) - len(name.lstrip("."))
        for _ in range(dots - 1):
            above = above.parent
        parts = name.strip(".").split(".")
        bases = [above] if dots else [above, *above.parents[:3]]
        for base in bases:
            for cut in (len(parts), len(parts) - 1):
                for file in (base.joinpath(*parts[:cut]).with_suffix(".py"),) if cut else ():
                    if file.is_file():
                        return file.resolve()
                package = base.joinpath(*parts[:cut], "__init__.py")
                if cut and package.is_file():
                    return package.resolve()
        return None

    def program(self, module: Module) -> list[Module]:
        """Return the modules of the programs that a module takes part in."""
        path = self._paths[module]
        if path not in self._programs:
            reached = {one: self._reach(one) for one in self.modules}
            for one in self.modules:
                parts = set(reached[one])
                for other in self.modules:
                    if one in reached[other]:
                        parts |= reached[other]
                self._programs[one] = [self.modules[part] for part in sorted(parts)]
        return self._programs[path]

    def _reach(self, path: Path) -> set[Path]:
        found, left = {path}, [path]
        while left:
            for module in self._imported.get(left.pop(), ()):
                other = self._paths[module]
                if other not in found:
                    found.add(other)
                    left.append(other)
        return found

    # Text ------------------------------------------------------------------------------------------

    def found(self, module: Module, pattern: str) -> list[str]:
        """Return what a pattern finds in a module's source; looked for once."""
        key = module, pattern
        if key not in self._matches:
            self._matches[key] = re.findall(pattern, module.text)
        return self._matches[key]

    def called(self, module: Module) -> set[str]:
        """Return what a module calls: functions by name, methods by `.` and their last name."""
        if module not in self._called:
            methods = [one.func for one in module.calls if isinstance(one.func, ast.Attribute)]
            names = self._named_calls(module).keys()
            self._called[module] = names | {f".{method.attr}" for method in methods}
        return self._called[module]

    def calls(self, module: Module, name: str) -> list[ast.Call]:
        """Return a module's calls of the function with a name, in their order."""
        return self._named_calls(module).get(name, [])

    def _named_calls(self, module: Module) -> dict[str, list[ast.Call]]:
        if module not in self._named:
            found = self._named[module] = defaultdict(list)
            for call in module.calls:
                found[self.name(module, call.func)].append(call)
        return self._named[module]

    # Names ---------------------------------------------------------------------------------------

    def name(self, module: Module, node: ast.AST) -> str:
        """Return what an expression is called where it was defined, or an empty text."""
        text = dotted(node)
        first, dot, rest = text.partition(".")
        if first not in module.imports:
            return text
        full = module.imports[first] + dot + rest
        if full in _SHORT:
            return _SHORT[full]
        for prefix, short in _PREFIXES.items():
            if full.startswith(prefix):
                return _SHORT.get(full, short + full.removeprefix(prefix))
        return full

    def definition(self, module: Module, node: ast.AST) -> Function | ast.ClassDef | None:
        """Return the function or class of the project that an expression names."""
        if isinstance(node, ast.Name):
            if node.id in module.free_functions:
                return module.free_functions[node.id]
            return module.classes.get(node.id) or self._imported_definition(module, node.id)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "self":
                return self._method(module, module.enclosing_class(node), node.attr)
            if node.value.id in module.imports:
                return self._imported_definition(module, f"{node.value.id}.{node.attr}")
        if isinstance(node, ast.Attribute):
            home, made = self._made(module, node.value)
            return self._method(home, made, node.attr) if made is not None else None
        return None

    def _imported_definition(self, module: Module, text: str) -> Function | ast.ClassDef | None:
        first, _, rest = text.partition(".")
        full = module.imports.get(first, "")
        file = self._find(module, full + ("." + rest if rest else "")) if full else None
        other = self.modules.get(file) if file else None
        wanted = text.rpartition(".")[2] if rest else full.rpartition(".")[2]
        if other is None or other is module:
            return None
        return other.free_functions.get(wanted) or other.classes.get(wanted)

    def _method(self, module: Module, owner: ast.ClassDef | None, name: str) -> Function | None:
        for one in owner.body if owner is not None else ():
            if isinstance(one, Function) and one.name == name:
                return one
        return None

    def _made(self, module: Module, node: ast.AST) -> tuple[Module, ast.ClassDef | None]:
        """Return the class of the project that a variable is an instance of."""
        values: list[ast.expr | Part] = [node] if isinstance(node, ast.Call) else []
        if isinstance(node, ast.Name):
            values = module.bound.get((module.scope(node), node.id), [])
            values = values or module.bound.get((module.tree, node.id), [])
        elif isinstance(node, ast.Attribute):
            values = module.attributes.get((module.enclosing_class(node), dotted(node)), [])
        for value in values:
            if isinstance(value, ast.Call) and not isinstance(value.func, ast.Attribute):
                found = self.definition(module, value.func)
                if isinstance(found, ast.ClassDef):
                    return self.module_of(found), found
        return module, None

    def module_of(self, node: ast.AST) -> Module:
        """Return the module that a function or a class is defined in."""
        for module in self.modules.values():
            if node in module.parents or node is module.tree:
                return module
        raise KeyError(node)

    # Calls ---------------------------------------------------------------------------------------

    @cached_property
    def sites(self) -> dict[ast.AST, list[tuple[Module, Site]]]:
        """Of each function of the project, the calls of it; `mp.spawn` calls what it is given."""
        found: dict[ast.AST, list[tuple[Module, Site]]] = defaultdict(list)
        for module in list(self.modules.values()):
            for call in module.calls:
                called = self.definition(module, call.func)
                if isinstance(called, ast.ClassDef):
                    called = self._method(module, called, "__init__")
                given = {one.arg: one.value for one in call.keywords if one.arg}
                if called is not None:
                    site = Site(call, tuple(call.args), given)
                    found[called].append((module, site))
                elif self.name(module, call.func) in ("mp.spawn", "mp.start_processes"):
                    self._spawned(module, call, given, found)
        return found

    def _spawned(
        self,
        module: Module,
        call: ast.Call,
        given: dict[str, ast.expr],
        found: dict[ast.AST, list[tuple[Module, Site]]],
    ) -> None:
        target = call.args[0] if call.args else given.get("fn")
        rest = call.args[1] if len(call.args) > 1 else given.get("args")
        called = self.definition(module, target) if target is not None else None
        if called is not None:
            elements = tuple(rest.elts) if isinstance(rest, ast.Tuple) else ()
            found[called].append((module, Site(call, (None, *elements), {})))

    def callee(self, module: Module, call: ast.Call) -> Function | None:
        """Return the function of the project that a call runs."""
        called = self.definition(module, call.func)
        return called if isinstance(called, Function) else None

    # Values --------------------------------------------------------------------------------------

    def sources(self, module: Module, node: ast.expr) -> Iterator[tuple[Module, ast.expr]]:
        """Yield the expressions that a value may come from, in this file and the project's modules.

        Names are followed to what is bound to them, parameters to the arguments of calls, calls of the
        project's functions to what these return. What cannot be followed is yielded as it stands.
        """
        yield from self._sources(module, node, DEPTH, set())

    def _sources(
        self, module: Module, node: ast.expr, depth: int, seen: set[ast.AST]
    ) -> Iterator[tuple[Module, ast.expr]]:
        if depth == 0 or node in seen:
            return
        seen.add(node)
        values = list(self._next(module, node))
        if not values or isinstance(node, ast.Call):
            yield module, node
        for home, value in values:
            yield from self._sources(home, value, depth - 1, seen)

    def _next(self, module: Module, node: ast.expr) -> Iterable[tuple[Module, ast.expr]]:
        match node:
            case ast.Name():
                return self._bindings(module, node)
            case ast.Attribute():
                return self._attribute(module, node)
            case ast.Call(func=ast.Attribute(attr=attr, value=value)) if attr in _SAME:
                return [(module, value)]
            case ast.Call():
                return self._returned(module, node)
        return [(module, value) for value in _alternatives(node)]

    def _attribute(self, module: Module, node: ast.Attribute) -> list[tuple[Module, ast.expr]]:
        text = dotted(node)
        own = module.enclosing_class(node) if text.startswith("self.") else None
        return self._values(module, module.attributes.get((own, text), []))

    def _bindings(self, module: Module, node: ast.Name) -> list[tuple[Module, ast.expr]]:
        scope: Scope = module.scope(node)
        while True:
            values = module.bound.get((scope, node.id), [])
            given = self.arguments(scope, node.id) if isinstance(scope, Function) else []
            if values or given:
                return self._values(module, values) + given
            if isinstance(scope, ast.Module):
                return []
            scope = module.scope(scope)

    def _values(
        self, module: Module, values: Iterable[ast.expr | Part]
    ) -> list[tuple[Module, ast.expr]]:
        found: list[tuple[Module, ast.expr]] = []
        for value in values:
            if isinstance(value, Part):
                found += self.elements(module, value)
            else:
                found.append((module, value))
        return found

    def elements(self, module: Module, part: Part) -> list[tuple[Module, ast.expr]]:
        """Return what an element may be of a value that several names are bound to."""
        call = part.value
        if not isinstance(call, ast.Call):
            return []
        prepared = isinstance(call.func, ast.Attribute) and call.func.attr in _PREPARE
        if prepared and part.index < len(call.args):
            return [(module, call.args[part.index]), (module, call)]
        found = []
        for home, value in self._returned(module, call):
            if isinstance(value, ast.Tuple) and part.index < len(value.elts):
                found.append((home, value.elts[part.index]))
        return found

    def _returned(self, module: Module, call: ast.Call) -> list[tuple[Module, ast.expr]]:
        called = self.callee(module, call)
        if called is None:
            return []
        home = self.module_of(called)
        return [
            (home, node.value)
            for node in ast.walk(called)
            if isinstance(node, ast.Return) and node.value and home.scope(node) is called
        ]

    def arguments(self, function: Function, name: str) -> list[tuple[Module, ast.expr]]:
        """Return what calls give for a parameter, and its default."""
        spec = function.args
        names = [one.arg for one in (*spec.posonlyargs, *spec.args)]
        if name not in names and name not in [one.arg for one in spec.kwonlyargs]:
            return []
        home = self.module_of(function)
        method = bool(names) and names[0] in ("self", "cls")
        place = names.index(name) - method if name in names else None
        found = []
        for module, site in self.sites.get(function, ()):
            given = site.keywords.get(name)
            if given is None and place is not None and 0 <= place < len(site.positional):
                given = site.positional[place]
            if given is not None and not isinstance(given, ast.Starred):
                found.append((module, given))
        defaults = dict(zip(reversed(names), reversed(spec.defaults), strict=False))
        if name in defaults:
            found.append((home, defaults[name]))
        return found


def _alternatives(node: ast.expr) -> list[ast.expr]:
    """Return the expressions of which one is the value of this one."""
    match node:
        case ast.IfExp():
            return [node.body, node.orelse]
        case ast.BoolOp():
            return node.values
        case ast.NamedExpr() | ast.Await():
            return [node.value]
    return []
