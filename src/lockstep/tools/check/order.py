"""Order and conditions in which a program executes its calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.tools.check.script import Script
from lockstep.tools.check.source import Function, Loop

_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def conditions(script: Script, node: ast.AST, depth: int = 4) -> set[ast.AST]:
    """Return the nodes that may keep a program from a node, also around the calls of its function.

    These are branches, `try`, loops, and branches before it that return, raise or leave a loop.
    """
    found: set[ast.AST] = set()
    parents, current = script.module.parents, node
    while (parent := parents.get(current)) is not None:
        branch = isinstance(parent, ast.If | ast.IfExp) and current is not parent.test
        main = isinstance(parent, ast.If) and "__name__" in ast.unparse(parent.test)
        if (branch and not main) or isinstance(parent, Loop | ast.Try | ast.BoolOp):
            found.add(parent)
        found.update(_left_before(parent, current))
        if isinstance(parent, Function):
            for module, site in script.project.sites.get(parent, ()) if depth else ():
                found |= conditions(script.of(module), site.call, depth - 1)
            return found
        current = parent
    return found


def _left_before(parent: ast.AST, child: ast.AST) -> Iterator[ast.stmt]:
    """Yield the branches before a statement, in its block, by which it may be passed over."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and child in block:
            for one in block[: block.index(child)]:
                compound = isinstance(one, ast.If | ast.Try | Loop)
                if compound and any(isinstance(inner, _LEAVES) for inner in ast.walk(one)):
                    yield one


def wrapped_before(script: Script, node: ast.expr, *wrappers: str) -> ast.Call | None:
    """Return the call that has wrapped a model when `node` is evaluated."""
    module = script.module
    for call in [one for value in _bound(script, node) for one in script.made_by(value, *wrappers)]:
        if call not in module.parents:
            return call
        same = module.scope(call) is module.scope(node)
        inside = any(one is node for one in ast.walk(call))
        after = (call.lineno, call.col_offset) >= (node.lineno, node.col_offset)
        if not inside and not (same and (after or script.exclusive(call, node))):
            return call
    return None


def _bound(script: Script, node: ast.expr) -> list[ast.expr]:
    """Return what a name was bound to before it is read, in its function; itself where nothing was."""
    name = node.id if isinstance(node, ast.Name) else ""
    bound = script.module.bound.get((script.module.scope(node), name), [])
    values = [one for one in bound if isinstance(one, ast.expr)]
    if not values or len(values) < len(bound):  # a part of a value is followed from the name
        return [node]
    return [one for one in values if script.earlier(one, node)]


def launcher_only(script: Script, call: ast.Call) -> bool:
    """Whether the launcher alone makes a call: at the top of a notebook, or of a file with `mp.spawn`."""
    top = isinstance(script.module.scope(call), ast.Module)
    return top and (bool(script.module.cells) or "mp.spawn" in script.called)


def _ways(script: Script, node: ast.expr, depth: int = 4) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Yield a node, the calls of its function, the calls of theirs and so on, each with its scope."""
    scope = script.module.scope(node)
    yield scope, node
    if depth and isinstance(scope, Function):
        for module, site in script.project.sites.get(scope, ()):
            yield from _ways(script.of(module), site.call, depth - 1)


def precedes(script: Script, one: ast.expr, home: Script, other: ast.expr) -> bool | None:
    """Whether `one`, of `script`, comes before `other`, of `home`; `None` where neither is shown."""
    answers = {
        (first.lineno, first.col_offset) < (second.lineno, second.col_offset)
        for scope, first in _ways(script, one)
        for same, second in _ways(home, other)
        if scope is same and first is not second
    }
    return answers.pop() if len(answers) == 1 else None
