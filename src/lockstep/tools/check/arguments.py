"""Arguments of a call in the syntax tree, by position or keyword."""

from __future__ import annotations

import ast


def argument(call: ast.Call, name: str, place: int | None = None) -> ast.expr | None:
    """Return an argument by its keyword or its position."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    starred = any(isinstance(one, ast.Starred) for one in call.args[: (place or 0) + 1])
    if place is not None and place < len(call.args) and not starred:
        return call.args[place]
    return None


def spread(call: ast.Call) -> bool:
    """Whether a call has unpacked arguments: `*args`, `**settings`."""
    return any(isinstance(one, ast.Starred) for one in call.args) or any(
        keyword.arg is None for keyword in call.keywords
    )


def true(node: ast.expr | None) -> bool:
    """Whether an argument is the literal `True`."""
    return isinstance(node, ast.Constant) and node.value is True


def given(call: ast.Call) -> list[ast.expr]:
    """Return the arguments of a call, by position and by keyword."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]
