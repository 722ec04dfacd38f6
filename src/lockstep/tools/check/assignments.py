"""Queries on which variables the statements of a block assign, and on which paths."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from lockstep.tools.check.source import Module
from lockstep.tools.check.syntax import Loop, before, dotted, reads, stored


def binds(statements: Sequence[ast.stmt], name: str) -> bool:
    """Whether `statements` assign the variable `name` on every path.

    Loops count as executed at least once.
    """
    for statement in statements:
        match statement:
            case ast.If(body=body, orelse=orelse):
                bound = all(binds(block, name) or _leaves(block) for block in (body, orelse))
            case ast.Try(body=body, orelse=orelse, finalbody=last):
                bound = binds([*body, *orelse], name) or binds(last, name)
            case ast.With() | ast.For() | ast.While():
                bound = name in stored(head(statement)) or binds(statement.body, name)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                bound = name == statement.name
            case ast.AugAssign() | ast.AnnAssign(value=None) | ast.Match():
                bound = False
            case ast.Assign(value=value) if reads(name, value):  # as in `best = max(best, x)`
                bound = False
            case _:
                bound = name in stored(statement)
        if bound:
            return True
    return False


def _leaves(block: Sequence[ast.stmt]) -> bool:
    """Whether a block ends with a statement that leaves the iteration or the function."""
    ends = ast.Continue | ast.Break | ast.Return | ast.Raise
    return bool(block) and isinstance(block[-1], ends)


def head(statement: ast.stmt) -> ast.AST:
    """Return the part of a compound statement outside of its blocks, such as the test of an `if`.

    Other statements, such as an assignment, are returned themselves.
    """
    match statement:
        case ast.If(test=test) | ast.While(test=test):
            return test
        case ast.For(target=target, iter=over):
            return ast.Tuple([target, over])
        case ast.Match(subject=subject):
            return subject
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return ast.Tuple([])
        case ast.With(items=items):
            parts = [part for item in items for part in (item.context_expr, item.optional_vars)]
            return ast.Tuple([part for part in parts if part])
    return ast.Tuple([]) if hasattr(statement, "body") else statement


def counter(loop: ast.AST) -> set[str]:
    """Return a set with the name `i` for a loop `for i, … in enumerate(…)`; empty for another loop."""
    match loop:
        case ast.For(target=ast.Tuple(elts=[ast.Name(id=name), *_]), iter=ast.Call(func=func)):
            return {name} if dotted(func) == "enumerate" else set()
    return set()


def assigned_before(module: Module, loop: Loop, node: ast.stmt, name: str) -> bool:
    """Whether every iteration of `loop` assigns the variable `name` before it executes `node`."""
    for parent, child in module.ancestry(node):
        own = stored(head(parent)) if isinstance(parent, ast.stmt) else set()
        counted = counter(loop) if parent is loop else set()
        if binds(before(parent, child), name) or name in own - counted:
            return True
        if parent is loop:
            break
    return False
