"""Statements of the script that a running frame is in, from its source, and the names in them."""

from __future__ import annotations

import ast
import dis
import functools
import itertools
import linecache
from collections.abc import Sequence
from types import CodeType
from typing import Any, NamedTuple

SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
LOOPS = (ast.For, ast.AsyncFor, ast.While)

Names = frozenset[str]
Block = Sequence[ast.stmt]
NONE: Names = frozenset()


class Stand(NamedTuple):
    """Where a frame stands in a block of statements; `owner` is what the block is part of."""

    owner: ast.AST
    block: Block
    place: int

    @property
    def now(self) -> ast.stmt:
        """The statement that it is in."""
        return self.block[self.place]


@functools.lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # no source, or of something else
        return ast.Module([], [])


@functools.cache
def scope(code: CodeType) -> Any:
    """Return the module or function that `code` was made from; an empty module if it is not there."""
    tree = _tree(code.co_filename)
    for node in ast.walk(tree) if code.co_name != "<module>" else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            first = (node, *node.decorator_list[:1])
            if code.co_firstlineno in [one.lineno for one in first]:
                return node
    return tree if code.co_name == "<module>" else ast.Module([], [])


def is_for(code: CodeType, offset: int) -> bool:
    """Whether the instruction at `offset` asks the iterator of a `for` for its next item."""
    return offset >= 0 and dis.opname[code.co_code[offset]] == "FOR_ITER"


@functools.cache
def imported(file: str) -> Names:
    """Return what a file imports, under its names there."""
    imports = (one for one in ast.walk(_tree(file)) if isinstance(one, ast.Import | ast.ImportFrom))
    return NONE.union(*(names_of(one)[1] for one in imports))


@functools.cache
def way_of(code: CodeType, offset: int) -> tuple[Stand, ...]:
    """Return the statements that a frame is in, the innermost last; none if they are not known."""
    line, _, column, _ = next(
        itertools.islice(code.co_positions(), offset // 2, None), (0, 0, 0, 0)
    )
    way: list[Stand] = []
    node = scope(code)
    while node is not None and not (way and isinstance(node, SCOPES)):
        stands = (Stand(node, block, i) for block in blocks(node) for i in range(len(block)))
        stand = next((one for one in stands if _is_in(one.now, (line or 0, column or 0))), None)
        way += [stand] if stand else []
        node = stand.now if stand else None
    return tuple(way)


def _is_in(node: ast.stmt, place: tuple[int, int]) -> bool:
    end = node.end_lineno or 0, node.end_col_offset or 0
    return (node.lineno, node.col_offset) <= place < end


def parts(node: Any) -> tuple[Block, list[Block], Block]:
    """Return the blocks of a statement: what is run first, what may be run then, what is run last."""
    if isinstance(node, ast.If):
        return (), [node.body, node.orelse], ()
    if isinstance(node, ast.While):
        return (), [node.body, ()], node.orelse
    if isinstance(node, ast.Match):
        return (), [*(case.body for case in node.cases), ()], ()
    if hasattr(node, "handlers"):
        return node.body, [node.orelse, *(one.body for one in node.handlers)], node.finalbody
    body = getattr(node, "body", ())
    return (body if isinstance(body, list) else ()), [], getattr(node, "orelse", ())


def blocks(node: ast.AST) -> list[Block]:
    """Return the blocks of a statement, a function or a module; none of a simple statement."""
    first, choice, last = parts(node)
    return [one for one in (first, *choice, last) if one]


def heads(statement: ast.stmt) -> list[ast.AST]:
    """Return what a statement with blocks evaluates besides them; without any, the statement itself."""
    if isinstance(statement, SCOPES) or not blocks(statement):
        return [statement]
    children = list(ast.iter_child_nodes(statement))
    cases = [
        part
        for one in children
        if isinstance(one, ast.match_case)
        for part in (one.pattern, one.guard)
    ]
    inner = (ast.stmt, ast.ExceptHandler, ast.match_case)
    return [one for one in (*children, *cases) if one is not None and not isinstance(one, inner)]


@functools.lru_cache(maxsize=1 << 16)
def names_of(node: ast.AST) -> tuple[Names, Names]:
    """Return the names that a part of a script reads, and those that it assigns, in its own scope."""
    inner = [names_of(child) for child in ast.iter_child_nodes(node)]
    loads, stores = NONE.union(*(one[0] for one in inner)), NONE.union(*(one[1] for one in inner))
    name = str(getattr(node, "asname", None) or getattr(node, "name", None) or "").partition(".")[0]
    if isinstance(node, ast.Name):
        is_read = isinstance(node.ctx, ast.Load)
        return (frozenset([node.id]), NONE) if is_read else (NONE, frozenset([node.id]))
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        loads |= {node.target.id}
    if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
        own = NONE.union(*(names_of(one.target)[1] for one in node.generators))
        return loads - own, stores - own
    if isinstance(node, SCOPES):
        outer = (one.names for one in ast.walk(node) if isinstance(one, ast.Global | ast.Nonlocal))
        given = {one.arg for one in ast.walk(node) if isinstance(one, ast.arg)}
        loads, stores = loads - (stores.difference(*outer) | given), NONE
    return loads, stores | ({name} if name else NONE)
