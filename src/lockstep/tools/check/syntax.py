"""Queries of Python's syntax trees that need no other file: names, arguments, statements."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import UnionType

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
#: Where a name is bound: a function, or the module.
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module
Variable = ast.Name | ast.Attribute


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for names and attributes of names, otherwise an empty text."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def last_name(node: ast.AST) -> str:
    """Return `c` for `a.b.c`."""
    return dotted(node).rpartition(".")[2]


def method(call: ast.Call) -> str:
    """Return the name of the method that is called, otherwise an empty text."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def receiver(call: ast.Call) -> ast.expr:
    """Return the object whose method is called."""
    assert isinstance(call.func, ast.Attribute)
    return call.func.value


def start(node: ast.expr | ast.stmt) -> tuple[int, int]:
    """Return where a node begins: its line and its column in bytes."""
    return node.lineno, node.col_offset


def before(parent: ast.AST, child: ast.AST) -> list[ast.stmt]:
    """Return the statements that stand before a statement in its block."""
    for name in ("body", "orelse", "finalbody"):
        block = getattr(parent, name, None)
        if isinstance(block, list) and child in block:
            return block[: block.index(child)]
    return []


def argument(call: ast.Call, name: str, place: int | None = None) -> ast.expr | None:
    """Return an argument by its keyword or its position."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    starred = any(isinstance(arg, ast.Starred) for arg in call.args[: (place or 0) + 1])
    if place is not None and place < len(call.args) and not starred:
        return call.args[place]
    return None


def spread(call: ast.Call) -> bool:
    """Whether a call has unpacked arguments: `*args`, `**settings`."""
    return any(isinstance(arg, ast.Starred) for arg in call.args) or any(
        keyword.arg is None for keyword in call.keywords
    )


def true(node: ast.expr | None) -> bool:
    """Whether an argument is the literal `True`."""
    return isinstance(node, ast.Constant) and node.value is True


def all_arguments(call: ast.Call) -> list[ast.expr]:
    """Return the arguments of a call, by position and by keyword."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def method_calls(node: ast.AST, *methods: str) -> list[ast.Call]:
    """Return the calls of methods with these names that stand in a node."""
    calls = (one for one in ast.walk(node) if isinstance(one, ast.Call))
    return [call for call in calls if method(call) in methods]


def variables(*nodes: ast.AST, context: type | UnionType = ast.expr_context) -> Iterator[Variable]:
    """Yield the names and attributes in nodes that are in a context: loaded, stored."""
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, Variable) and isinstance(part.ctx, context):
                yield part


def stored(*nodes: ast.AST) -> set[str]:
    """Return the variables and attributes that nodes bind."""
    return {dotted(one) for one in variables(*nodes, context=ast.Store | ast.Del)} - {""}


def root(node: ast.expr) -> ast.expr | None:
    """Return the variable that `model.fc` or `self.model.fc` begins with: `model`, `self.model`."""
    while True:
        match node:
            case ast.Name() | ast.Attribute(value=ast.Name(id="self")):
                return node
            case ast.Attribute(value=value) | ast.Subscript(value=value) | ast.Call(func=value):
                node = value
            case _:
                return None
