"""Edits of the concrete syntax by LibCST: comments and formatting stay as they are."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from lockstep.errors import UsageError

if TYPE_CHECKING:
    import libcst

    from lockstep.check.source import Module

Place = tuple[int, int]


@dataclass(frozen=True)
class Edit:
    """One change at a node.

    Attributes:
        kind: `argument` sets or, without code, removes a keyword of a call; `replace` puts another
            expression there, `statement` another statement; `first` puts a statement at the head of a
            loop's body; `before` and `after` put one beside a statement; `guard` puts it under `if CODE:`.
        node: the call, the expression, the loop or the statement.
        code: what is put there.
        name: the keyword, of `argument`.
    """

    kind: Literal["argument", "replace", "statement", "first", "before", "after", "guard"]
    node: ast.expr | ast.stmt
    code: str = ""
    name: str = ""


def available() -> None:
    """Look whether files can be edited.

    Raises:
        UsageError: if LibCST is not installed.
    """
    try:
        import libcst  # noqa: F401
    except ImportError as error:
        raise UsageError(
            f"fixes need LibCST, which cannot be imported: {error}",
            hint="pip install 'torch-lockstep[check]'",
        ) from None


def apply(module: Module, edits: Iterable[Edit]) -> str:
    """Return the source of a module with all edits made."""
    import libcst
    from libcst.metadata import MetadataWrapper

    from lockstep.check.editor import Editor

    lines = module.text.split("\n")
    expressions: dict[Place, list[Edit]] = defaultdict(list)
    statements: dict[Place, list[Edit]] = defaultdict(list)
    for edit in dict.fromkeys(edits):
        table = expressions if isinstance(edit.node, ast.expr) else statements
        table[_place(edit.node, lines)].append(edit)
    tree = MetadataWrapper(libcst.parse_module(module.text), unsafe_skip_copy=True)
    changed: libcst.Module = tree.visit(Editor(expressions, statements))
    return changed.code


def _place(node: ast.expr | ast.stmt, lines: list[str]) -> Place:
    """Return line and column as LibCST counts them: in characters, where Python counts bytes."""
    start = lines[node.lineno - 1].encode()[: node.col_offset]
    return node.lineno, len(start.decode())
