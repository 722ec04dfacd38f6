"""Determine in which order, and under which conditions, a program executes its calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.tools.check.script import Script
from lockstep.tools.check.syntax import Function, Loop, before, start

_LEAVES = (ast.Return, ast.Raise, ast.Continue, ast.Break)


def conditions(script: Script, node: ast.AST, depth: int = 4) -> set[ast.AST]:
    """Return the syntax nodes that decide whether a program executes `node`: `if`, `try`, loops, exits.

    Nodes around the calls of the function that contains `node` count, too, over `depth` levels of calls.
    """
    found: set[ast.AST] = set()
    for parent, child in script.module.ancestry(node):
        branch = isinstance(parent, ast.If | ast.IfExp) and child is not parent.test
        main = isinstance(parent, ast.If) and "__name__" in ast.unparse(parent.test)
        if (branch and not main) or isinstance(parent, Loop | ast.Try | ast.BoolOp):
            found.add(parent)
        found.update(
            statement
            for statement in before(parent, child)
            if isinstance(statement, ast.If | ast.Try | Loop)
            and any(isinstance(inner, _LEAVES) for inner in ast.walk(statement))
        )
        if isinstance(parent, Function):
            for caller, call in script.callers(parent) if depth else ():
                found |= conditions(caller, call, depth - 1)
            break
    return found


def wrapped_before(script: Script, node: ast.expr, *wrappers: str) -> ast.Call | None:
    """Return a call of one of `wrappers` that has wrapped the model `node` before `node` runs.

    Return `None` if there is no such call. `node`: an expression whose value is a model. `wrappers`: names
    of functions, such as `DDP`.
    """
    module = script.module
    for call in [
        call for value in _bound(script, node) for call in script.made_by(value, *wrappers)
    ]:
        if call not in module.parents:
            return call
        same = module.scope(call) is module.scope(node)
        inside = any(part is node for part in ast.walk(call))
        late = same and (start(call) >= start(node) or script.module.exclusive(call, node))
        if not inside and not late:
            return call
    return None


def _bound(script: Script, node: ast.expr) -> list[ast.expr]:
    """Return the expressions that are assigned to the variable `node` earlier in the same function.

    Return `[node]` if nothing is assigned to it there, or if a value comes from unpacking a tuple.
    """
    name = node.id if isinstance(node, ast.Name) else ""
    bound = script.module.bound.get((script.module.scope(node), name), [])
    values = [value for value in bound if isinstance(value, ast.expr)]
    if not values or len(values) < len(bound):  # an unpacked element: `sources` follows the name
        return [node]
    return [value for value in values if script.module.earlier(value, node)]


def launcher_only(script: Script, call: ast.Call) -> bool:
    """Whether only the parent process of the ranks makes a call.

    This holds for calls at the top level of a notebook, or of a program that calls `mp.spawn`.
    """
    top = isinstance(script.module.scope(call), ast.Module)
    return top and (bool(script.module.cells) or "mp.spawn" in script.called)


def _ways(script: Script, node: ast.expr, depth: int = 4) -> Iterator[tuple[ast.AST, ast.expr]]:
    """Yield `node`, the calls of the function around it, the calls of their functions, and so on.

    Each is a pair `(scope, expression)`. The scope is the function or module that contains the expression.
    Calls are followed over `depth` levels.
    """
    scope = script.module.scope(node)
    yield scope, node
    if depth and isinstance(scope, Function):
        for caller, call in script.callers(scope):
            yield from _ways(caller, call, depth - 1)


def precedes(script: Script, one: ast.expr, home: Script, other: ast.expr) -> bool | None:
    """Whether a program evaluates `one`, which is in `script`, before `other`, which is in `home`.

    Return `None` if this is not known.
    """
    answers = {
        start(first) < start(second)
        for scope, first in _ways(script, one)
        for same, second in _ways(home, other)
        if scope is same and first is not second
    }
    return answers.pop() if len(answers) == 1 else None
