"""Queries of one node of Python's syntax tree: names, arguments, statements."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from types import UnionType

Function = ast.FunctionDef | ast.AsyncFunctionDef
Loop = ast.For | ast.AsyncFor | ast.While
#: A scope of names: a function, a lambda, or the module.
Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module
Variable = ast.Name | ast.Attribute
#: Functions that only combine the values of their arguments.
_ARITHMETIC = {"sum", "mean", "float", "round", "min", "max"}


def dotted(node: ast.AST) -> str:
    """Return the name `a.b.c` of a variable or an attribute of a variable; empty for other expressions."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(parts)])


def last_name(node: ast.AST) -> str:
    """Return the last part of a dotted name: `c` for `a.b.c`."""
    return dotted(node).rpartition(".")[2]


def method(call: ast.Call) -> str:
    """Return the name of the method that a call runs, such as `step`; empty for a call of a function."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def receiver(call: ast.Call) -> ast.expr:
    """Return the object of a method call: `model` of `model.eval()`."""
    assert isinstance(call.func, ast.Attribute)
    return call.func.value


def start(node: ast.expr | ast.stmt) -> tuple[int, int]:
    """Return the line and the column, in bytes, at which a node begins."""
    return node.lineno, node.col_offset


def blocks(node: ast.AST | None) -> list[list[ast.stmt]]:
    """Return the blocks of statements that a node has, such as the body and the `else` of an `if`."""
    found = (getattr(node, name, None) for name in ("body", "orelse", "finalbody"))
    return [block for block in found if isinstance(block, list)]


def before(parent: ast.AST, child: ast.AST) -> list[ast.stmt]:
    """Return the statements that precede the statement `child` in the same block of `parent`."""
    return next((one[: one.index(child)] for one in blocks(parent) if child in one), [])


def statements(block: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a block and those inside them, in the order of the source.

    Functions and classes are left out.
    """
    for statement in block:
        if isinstance(statement, Function | ast.ClassDef):
            continue
        if isinstance(
            statement, ast.stmt
        ):  # not the cases of a `match`, nor the handlers of a `try`
            yield statement
        for name in ("body", "handlers", "cases", "orelse", "finalbody"):
            yield from statements(getattr(statement, name, ()))


def argument(call: ast.Call, name: str, place: int | None = None) -> ast.expr | None:
    """Return the argument with the keyword `name` or at the position `place`; `None` if missing."""
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
    """Return the values of all arguments of a call, positional ones first."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def method_calls(node: ast.AST, *methods: str) -> list[ast.Call]:
    """Return the calls inside `node` of methods with the names `methods`."""
    calls = (one for one in ast.walk(node) if isinstance(one, ast.Call))
    return [call for call in calls if method(call) in methods]


def variables(*nodes: ast.AST, context: type | UnionType = ast.expr_context) -> Iterator[Variable]:
    """Yield the variables and attributes inside `nodes` that are read, assigned or deleted.

    `context` restricts them to one use, such as `ast.Store` for assignments.
    """
    for node in nodes:
        for part in ast.walk(node):
            if isinstance(part, Variable) and isinstance(part.ctx, context):
                yield part


def reads(name: str, *nodes: ast.AST) -> list[Variable]:
    """Return the places inside `nodes` that read the variable `name`, such as `lr` or `self.lr`."""
    return [one for one in variables(*nodes, context=ast.Load) if dotted(one) == name]


def stored(*nodes: ast.AST) -> set[str]:
    """Return the dotted names of variables and attributes that nodes assign or delete.

    The variables of comprehensions are not among them: they exist inside the comprehension only.
    """
    parts = [part for node in nodes for part in ast.walk(node)]
    inner = {
        one
        for part in parts
        if isinstance(part, ast.comprehension)
        for one in variables(part.target)
    }
    return {
        dotted(one) for one in variables(*nodes, context=ast.Store | ast.Del) if one not in inner
    } - {""}


def operands(node: ast.expr) -> list[ast.expr]:
    """Return the variables and calls that an expression combines: of `a + f(b) > c`, `a`, `f(b)` and `c`.

    Functions such as `sum` and `float` count as operators: of `float(a + b)` the result is `a` and `b`.
    Calls such as `loss.item()` count as the variable `loss`.
    """
    parts: list[ast.expr] = []
    match node:
        case ast.Call(func=ast.Attribute(value=owner, attr="item" | "detach" | "cpu")):
            parts = [owner]
        case ast.Call(func=func, args=args) if last_name(func) in _ARITHMETIC:
            parts = args
        case ast.Name() | ast.Attribute() | ast.Call():
            return [node]
        case ast.Subscript(value=part) | ast.UnaryOp(operand=part):
            parts = [part]
        case ast.BinOp(left=left, right=right):
            parts = [left, right]
        case ast.Compare(left=left, comparators=others):
            parts = [left, *others]
        case ast.BoolOp(values=values):
            parts = values
    return [one for part in parts for one in operands(part)]


def root(node: ast.expr) -> ast.expr | None:
    """Return the variable at the beginning of an expression: `self.model` of `self.model.fc.weight`.

    Return `None` if the expression begins with no variable.
    """
    while True:
        match node:
            case ast.Name() | ast.Attribute(value=ast.Name(id="self")):
                return node
            case ast.Attribute(value=value) | ast.Subscript(value=value) | ast.Call(func=value):
                node = value
            case _:
                return None
