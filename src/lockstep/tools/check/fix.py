"""Edits of the concrete syntax by LibCST: comments and formatting stay as they are."""

from __future__ import annotations

import ast
import os
import stat
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep.errors import OutputError, UsageError
from lockstep.state.files.atomic_file import replacing

if TYPE_CHECKING:
    import libcst

    from lockstep.tools.check.source import Module

#: A statement that stands where another part of a loop's body begins; in the loops to be, where one goes.
PART = "lockstep: the next part"
Place = tuple[int, int]
Kind = Literal[
    "argument", "replace", "callee", "given", "wrap", "inside", "owner",
    "statement", "first", "before", "after", "guard",
    "delete", "splice", "with", "parameter", "comment", "passes",
]  # fmt: skip


@dataclass(frozen=True)
class Edit:
    """One change at a node.

    Attributes:
        kind: `argument` sets or, without code, removes a keyword of a call; `replace` puts another
            expression there, `statement` another statement; `first` puts a statement at the head of a
            loop's or a function's body; `before` and `after` put one beside a statement; `guard` puts it
            under `if CODE:`. `callee` calls another function, `given` gives a call one more argument
            before the others, `wrap` makes an expression the argument of a call; `inside` leaves of a
            call its first argument, of an attribute its object, and `owner` makes the object of a method
            the argument of a function. `delete` removes a statement, `splice` leaves of an `if` its body,
            `with` puts a statement and all that follow in its block under `with CODE:`, `parameter` adds
            one before the others (after `self`) or, without code, removes the first, `comment` puts
            a comment above, `passes` makes of a loop the loops of CODE, with the parts of its body.
        node: the call, the expression, the loop or the statement.
        code: what is put there.
        name: the keyword, of `argument`.
    """

    kind: Kind
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
            f"a script is edited with LibCST, which cannot be imported: {error}",
            hint="pip install 'torch-lockstep[check]'",
        ) from None


def apply(module: Module, edits: Iterable[Edit]) -> str:
    """Return the source of a module with all edits made.

    Raises:
        UsageError: if LibCST cannot parse what Python can.
    """
    import libcst
    from libcst.metadata import MetadataWrapper

    from lockstep.tools.check.editor import Editor

    lines = module.text.split("\n")
    expressions: dict[Place, list[Edit]] = defaultdict(list)
    statements: dict[Place, list[Edit]] = defaultdict(list)
    for edit in dict.fromkeys(edits):
        table = expressions if isinstance(edit.node, ast.expr) else statements
        table[_place(edit.node, lines)].append(edit)
    try:
        tree = MetadataWrapper(libcst.parse_module(module.text), unsafe_skip_copy=True)
    except libcst.ParserSyntaxError as error:
        where = error.message.partition(": expected")[0].removeprefix("parser error: ")
        raise UsageError(
            f"{module.path}: LibCST, which edits scripts, cannot parse what Python can: {where}",
            hint="write the line in another way: `x: int = 1` and not `(x): int = 1`, for example",
        ) from None
    changed: libcst.Module = tree.visit(Editor(expressions, statements))
    return changed.code


def diff(path: Path, before: str, after: str) -> str:
    """Return what differs between two texts of a file, as `diff -u` writes it."""
    import difflib

    texts = before.splitlines(True), after.splitlines(True)
    lines = difflib.unified_diff(*texts, str(path), str(path))
    last = "\n\\ No newline at end of file\n"
    return "".join(one if one.endswith("\n") else one + last for one in lines)


def overwrite(path: Path, text: str, encoding: str) -> None:
    """Put a text in the place of a file, whole or not at all; its mode stays.

    Raises:
        OutputError: if it cannot be written.
    """
    target = path.resolve()
    try:
        with target.open("r+b") as file:  # refuses a file that may not be written
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        with replacing(target, 0o600) as file:
            file.write(text.encode(encoding))
            os.fchmod(file.fileno(), mode)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}") from None


def _place(node: ast.expr | ast.stmt, lines: list[str]) -> Place:
    """Return line and column as LibCST counts them: in characters, where Python counts bytes."""
    start = lines[node.lineno - 1].encode()[: node.col_offset]
    return node.lineno, len(start.decode())
