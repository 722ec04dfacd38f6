"""Statements of a script: which of them a running frame executes, their parts, and the names they use."""

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


class StatementPosition(NamedTuple):
    """Position of a running frame in a list of statements.

    `block` is the list. `owner` is the module, function, loop or other statement that has this list.
    `place` is the index of the statement that is running.
    """

    owner: ast.AST
    block: Block
    place: int

    @property
    def now(self) -> ast.stmt:
        """The statement in `block` that the frame is executing."""
        return self.block[self.place]


@functools.lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module:
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):  # no source, or source in another language
        return ast.Module([], [])


@functools.cache
def scope(code: CodeType) -> Any:
    """Return the syntax tree of the module or function whose code object is `code`.

    Without source the result is an empty module.
    """
    tree = _tree(code.co_filename)
    for node in ast.walk(tree) if code.co_name != "<module>" else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == code.co_name:
            first = (node, *node.decorator_list[:1])
            if code.co_firstlineno in [one.lineno for one in first]:
                return node
    return tree if code.co_name == "<module>" else ast.Module([], [])


def is_for(code: CodeType, offset: int) -> bool:
    """Whether the instruction at bytecode `offset` takes the next item of a `for` loop's iterator."""
    return offset >= 0 and dis.opname[code.co_code[offset]] == "FOR_ITER"


@functools.cache
def way_of(code: CodeType, offset: int) -> tuple[StatementPosition, ...]:
    """Return where the instruction at bytecode `offset` is in each list of statements around it.

    Each position names the statement of the list that contains the instruction. The list of the function or
    module comes first, that of the innermost loop or `if` last.
    """
    positions = itertools.islice(code.co_positions(), offset // 2, None)
    line, _, column, _ = next(positions, (0, 0, 0, 0))
    place = (line or 0, column or 0)
    way: list[StatementPosition] = []
    node = scope(code)
    while node is not None and not (way and isinstance(node, SCOPES)):
        stands = (
            StatementPosition(node, block, i) for block in blocks(node) for i in range(len(block))
        )
        stand = next((one for one in stands if _is_in(one.now, place)), None)
        way += [stand] if stand else []
        node = stand.now if stand else None
    return tuple(way)


def _is_in(node: ast.stmt, place: tuple[int, int]) -> bool:
    end = node.end_lineno or 0, node.end_col_offset or 0
    return (node.lineno, node.col_offset) <= place < end


def parts(node: Any) -> tuple[Block, list[Block], Block]:
    """Return the blocks of a compound statement: the first, the alternatives, and the last.

    A block is a list of statements. The first block runs, then one of the alternatives, then the last
    block. For a `try` the first is its body, the alternatives are `else` and the handlers, and the last is
    `finally`. An `if` has only alternatives.
    """
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
    """Return the lists of statements in a statement, function or module; none for a simple statement."""
    first, choice, last = parts(node)
    return [one for one in (first, *choice, last) if one]


def heads(statement: ast.stmt) -> list[ast.AST]:
    """Return a statement's parts that are not inner statements, such as the test of an `if`."""
    if isinstance(statement, SCOPES) or not blocks(statement):
        return [statement]
    children = [*ast.iter_child_nodes(statement)]
    cases = [own for own in children if isinstance(own, ast.match_case)]
    children += [part for one in cases for part in (one.pattern, one.guard) if part is not None]
    inner = (ast.stmt, ast.ExceptHandler, ast.match_case)
    return [one for one in children if not isinstance(one, inner)]


@functools.lru_cache(maxsize=1 << 16)
def names_of(node: ast.AST) -> tuple[Names, Names]:
    """Return the names of the variables that a syntax tree reads, and of those that it assigns.

    Variables that are local to functions and comprehensions inside the tree are left out.
    """
    inner = [names_of(child) for child in ast.iter_child_nodes(node)]
    loads, stores = (NONE.union(*(one[kind] for one in inner)) for kind in (0, 1))
    name = str(getattr(node, "asname", None) or getattr(node, "name", None) or "").partition(".")[0]
    if isinstance(node, ast.Name):
        own = frozenset([node.id])
        return (own, NONE) if isinstance(node.ctx, ast.Load) else (NONE, own)
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
