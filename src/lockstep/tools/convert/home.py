"""Place where the run is made, and its way to the functions and classes that need it."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from lockstep.errors import UsageError
from lockstep.tools.check.fix import Edit
from lockstep.tools.check.script import Script
from lockstep.tools.check.source import Function, Loop, Module, Scope
from lockstep.tools.convert import questions
from lockstep.tools.convert.draft import RUN, Draft


@dataclass
class Home:
    """The function, or the file, whose block the run is made in.

    Attributes:
        scope: the function, or the file.
        block: the statements of which the first needs it.
        start: the number of the first in its block.
    """

    scope: Scope
    block: list[ast.stmt]
    start: int


def find(draft: Draft, needing: list[ast.AST]) -> Home:
    """Return where the run is made: the innermost function that all that needs it is called from."""
    script, module = draft.script, draft.module
    loops = script.epoch_loops or script.step_loops
    scope: Scope = module.scope(loops[0])
    while not isinstance(scope, ast.Module) and not all(
        under(script, one, scope) for one in needing
    ):
        sites = [site.call for home, site in script.project.sites.get(scope, ()) if home is module]
        scope = module.scope(sites[0]) if sites else module.tree
    entries = [one for node in needing for one in _entries(script, node, scope)]
    if all(isinstance(one, Function | ast.ClassDef) for one in entries):
        raise UsageError(
            f"{module.path} has a training loop, and nothing that calls it; expected a script",
            hint="convert the file that is started, with the loop in it",
        )
    block, start = _common(module, scope, entries)
    return Home(scope, block, start)


def under(script: Script, node: ast.AST, scope: Scope, depth: int = 6) -> bool:
    """Whether a node stands in a function, or only in functions that are called from there."""
    module = script.module
    if scope in module.above(node):
        return True
    function = module.scope(node)
    sites = _sites(script, function)
    return bool(sites and depth) and all(under(script, call, scope, depth - 1) for call in sites)


def _sites(script: Script, function: ast.AST) -> list[ast.Call]:
    """Return the calls of a function in its file; of an `__init__`, those that make its class."""
    module = script.module
    return [site.call for home, site in script.project.sites.get(function, ()) if home is module]


def _entries(script: Script, node: ast.AST, scope: Scope, depth: int = 6) -> list[ast.stmt]:
    """Return the statements of a function's own body by which it comes to a node."""
    module = script.module
    nearest = module.scope(node)
    if nearest is scope or depth == 0:
        statement = node if isinstance(node, ast.stmt) else module.statement(node)
        return [statement] if statement is not None else []
    found = [
        entry
        for call in _sites(script, nearest)
        for entry in _entries(script, call, scope, depth - 1)
    ]
    return found or [
        one
        for one in module.above(node)
        if isinstance(one, ast.stmt) and module.parents.get(one) is scope
    ]


def _common(module: Module, scope: Scope, entries: list[ast.stmt]) -> tuple[list[ast.stmt], int]:
    """Return the innermost block, outside of loops, that has all entries, and where the first is."""
    assert not isinstance(scope, ast.Lambda)
    block = scope.body
    while True:
        tops = {_top(module, block, entry) for entry in entries}
        (only,) = tops if len(tops) == 1 else (None,)
        inner = None
        if (
            only is not None
            and not isinstance(only, Loop | Function | ast.ClassDef)
            and only not in entries
        ):
            inner = _block_with(module, only, entries)
        if inner is None:
            return block, min(block.index(one) for one in tops if one is not None)
        block = inner


def _top(module: Module, block: list[ast.stmt], entry: ast.stmt) -> ast.stmt | None:
    """Return the statement of a block that an entry stands in."""
    for one in (entry, *module.above(entry)):
        if one in block:
            return one
    return None


def _block_with(
    module: Module, statement: ast.stmt, entries: list[ast.stmt]
) -> list[ast.stmt] | None:
    for name in ("body", "orelse", "finalbody"):
        block = getattr(statement, name, None)
        if isinstance(block, list) and block and all(_top(module, block, one) for one in entries):
            return block
    return None


def spread(draft: Draft, home: Home, name: str) -> list[Edit]:
    """Return the edits with the run under its name in each function, and those that hand it on."""
    passed = _Passing(draft, home, name)
    edits = [
        replace(edit, code=edit.code.replace(RUN, passed.name_at(edit.node)))
        if RUN in edit.code
        else edit
        for edit in draft.edits
    ]
    return [*passed.edits, *edits]


class _Passing:
    """Hands the run on as a first argument; objects keep it as `self.run`."""

    def __init__(self, draft: Draft, home: Home, name: str) -> None:
        self.draft, self.home, self.name = draft, home, name
        self.edits: list[Edit] = []
        self._done: set[ast.AST] = set()

    def name_at(self, node: ast.AST) -> str:
        """Return what the run is called at a node, and see to it that it is there."""
        module = self.draft.module
        scope = module.scope(node)
        while isinstance(scope, ast.Lambda):
            scope = module.scope(scope)
        if scope is self.home.scope or isinstance(self.home.scope, ast.Module):
            return self.name
        if self.home.scope in module.above(scope) or not isinstance(scope, Function):
            return self.name
        owner = module.parents.get(scope)
        if not isinstance(owner, ast.ClassDef):
            self._give(scope)
            return self.name
        made = next(
            (one for one in owner.body if isinstance(one, Function) and one.name == "__init__"),
            None,
        )
        if made is None:
            self.draft.ask(owner, questions.CLASS.format(self.name))
        else:
            self._give(made, keep=True)
        return self.name if scope is made else f"self.{self.name}"

    def _give(self, function: Function, *, keep: bool = False) -> None:
        if function in self._done:
            return
        self._done.add(function)
        self.edits.append(Edit("parameter", function, self.name))
        if keep:
            at = _super(function)
            kept = f"self.{self.name} = {self.name}"
            self.edits.append(Edit("after", at, kept) if at else Edit("first", function, kept))
        sites = _sites(self.draft.script, function)
        for call in sites:
            if self.draft.script.name(call.func).startswith("mp."):
                continue  # asked about already
            self.edits.append(Edit("given", call, self.name_at(call)))
        if not sites:
            self.draft.ask(function, questions.CALLER.format(self.name))


def _super(function: Function) -> ast.stmt | None:
    """Return the statement that calls the `__init__` of a class above."""
    for one in function.body:
        if isinstance(one, ast.Expr) and ast.unparse(one).startswith("super("):
            return one
    return None
