"""Choose where in a script to make the run, and pass the run to functions and classes that need it."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from lockstep.errors import UsageError
from lockstep.tools.check.fix import Edit
from lockstep.tools.check.script import Script
from lockstep.tools.check.source import Module
from lockstep.tools.check.syntax import Function, Loop, Scope, blocks
from lockstep.tools.convert import questions
from lockstep.tools.convert.draft import RUN, Draft


@dataclass
class RunScope:
    """The place where a converted script makes the `lockstep.Run`.

    `scope` is the function that makes the run, or the module. `block` is the list of statements in which
    the run is made, and `start` the index in `block` from which statements go under `with lockstep.Run(…)`.
    """

    scope: Scope
    block: list[ast.stmt]
    start: int


def find(draft: Draft, needing: list[ast.AST]) -> RunScope:
    """Return where to make the `lockstep.Run`: in the innermost function that executes all of `needing`.

    `needing` are the nodes that use the run. The function contains them, or calls functions that do.
    """
    script, module = draft.script, draft.module
    loops = script.epoch_loops or script.step_loops
    scope: Scope = module.scope(loops[0])
    while not isinstance(scope, ast.Module) and not all(
        _under(script, one, scope) for one in needing
    ):
        calls = _calls(script, scope)
        scope = module.scope(calls[0]) if calls else module.tree
    entries = [one for node in needing for one in _entries(script, node, scope)]
    if all(isinstance(one, Function | ast.ClassDef) for one in entries):
        raise UsageError(
            f"{module.path} has a training loop, and nothing that calls it; expected a script",
            hint="convert the file that is started, with the loop in it",
        )
    block, start = _common(module, scope, entries)
    return RunScope(scope, block, start)


def _under(script: Script, node: ast.AST, scope: Scope, depth: int = 6) -> bool:
    """Whether `node` is in the function `scope`, or in a function that only code of `scope` calls.

    Calls are followed over `depth` levels.
    """
    if scope in script.module.above(node):
        return True
    calls = _calls(script, script.module.scope(node)) if depth else []
    return bool(calls) and all(_under(script, call, scope, depth - 1) for call in calls)


def _calls(script: Script, function: ast.AST) -> list[ast.Call]:
    """Return the calls of `function` in the same file; for an `__init__`, those of its class."""
    return [call for caller, call in script.callers(function) if caller is script]


def _entries(script: Script, node: ast.AST, scope: Scope, depth: int = 6) -> list[ast.stmt]:
    """Return the statements of the function `scope` that contain `node`, or execute it through calls.

    Calls are followed over `depth` levels.
    """
    module = script.module
    nearest = module.scope(node)
    if nearest is scope or depth == 0:
        statement = module.statement(node)
        return [statement] if statement is not None else []
    calls = _calls(script, nearest)
    found = [entry for call in calls for entry in _entries(script, call, scope, depth - 1)]
    return found or [
        parent
        for parent in module.above(node)
        if isinstance(parent, ast.stmt) and module.parents.get(parent) is scope
    ]


def _common(module: Module, scope: Scope, entries: list[ast.stmt]) -> tuple[list[ast.stmt], int]:
    """Return the innermost block that contains all of `entries`, and the index of the first one in it.

    A block is a list of statements of `scope`, but not one in a loop.
    """
    assert not isinstance(scope, ast.Lambda)
    block, ways = scope.body, [{entry, *module.above(entry)} for entry in entries]
    while True:
        tops = [next((statement for statement in block if statement in way), None) for way in ways]
        only = tops[0] if len(set(tops)) == 1 else None
        inner: list[list[ast.stmt]] = []
        if not isinstance(only, Loop | Function | ast.ClassDef) and only not in entries:
            inner = [one for one in blocks(only) if all(way.intersection(one) for way in ways)]
        if not inner:
            return block, min(block.index(one) for one in tops if one is not None)
        block = inner[0]


def pass_run(draft: Draft, scope: RunScope, name: str) -> list[Edit]:
    """Return the draft's edits with `name` as the run's variable, and edits that pass the run on.

    `scope` is where the run is made. Other functions that use the run get it as their first argument.
    """
    passed = _RunArgument(draft, scope, name)
    edits = [
        replace(edit, code=edit.code.replace(RUN, passed.name_at(edit.node)))
        if RUN in edit.code
        else edit
        for edit in draft.edits
    ]
    return [*passed.edits, *edits]


class _RunArgument:
    """Collects edits that pass the run to functions as first argument, or keep it in `self.run`."""

    def __init__(self, draft: Draft, scope: RunScope, name: str) -> None:
        self.draft, self.scope, self.name = draft, scope.scope, name
        self.edits: list[Edit] = []
        self._done: set[ast.AST] = set()

    def name_at(self, node: ast.AST) -> str:
        """Return the variable of the run at `node`, such as `run` or `self.run`.

        Edits that pass the run to the function around `node` are appended to `self.edits`.
        """
        module = self.draft.module
        scope = module.scope(node)
        while isinstance(scope, ast.Lambda):
            scope = module.scope(scope)
        if self.scope in (scope, module.tree, *module.above(scope)):
            return self.name
        if not isinstance(scope, Function):
            return self.name
        owner = module.parents.get(scope)
        if not isinstance(owner, ast.ClassDef):
            self._give(scope)
            return self.name
        methods = [statement for statement in owner.body if isinstance(statement, Function)]
        made = next((one for one in methods if one.name == "__init__"), None)
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
            calls = (one for one in function.body if ast.unparse(one).startswith("super("))
            made = next(calls, None)
            kept = f"self.{self.name} = {self.name}"
            self.edits.append(Edit("after", made, kept) if made else Edit("first", function, kept))
        sites = _calls(self.draft.script, function)
        for call in sites:
            if not self.draft.script.name(call.func).startswith("mp."):  # `mp.spawn` has a question
                self.edits.append(Edit("prepend", call, self.name_at(call)))
        if not sites:
            self.draft.ask(function, questions.CALLER.format(self.name))
