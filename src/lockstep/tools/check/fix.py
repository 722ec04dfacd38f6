"""Edits of a file's concrete syntax; comments and formatting stay as they are."""

from __future__ import annotations

import ast
import difflib
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lockstep.errors import OutputError, UsageError
from lockstep.state.files.atomic_file import replacing

#: A statement that stands where another part of a loop's body begins.
PART = "lockstep: the next part"
Kind = Literal[
    "argument", "replace", "callee", "prepend", "wrap", "unwrap", "receiver",
    "statement", "first", "before", "after", "guard",
    "delete", "splice", "with", "parameter", "comment", "passes",
]  # fmt: skip


@dataclass(frozen=True)
class Edit:
    """One change at an expression or a statement.

    Of a call: `argument` sets or, without code, removes the keyword `name`; `callee` calls another
    function; `prepend` gives one more argument before the others; `unwrap` leaves its first argument (of an
    attribute, its object); `receiver` makes the object of a method the argument of a function. Of any
    expression: `replace` puts another one there; `wrap` makes it the argument of a call.

    Of a statement: `statement` puts another one there; `before` and `after` put one beside it; `guard` puts
    it under `if CODE:`, `with` it and all that follow in its block under `with CODE:`; `delete` removes it;
    `comment` puts a comment above. Of an `if`: `splice` leaves its body. Of a loop or a function: `first`
    puts a statement at the head of its body. Of a function: `parameter` adds one before the others (after
    `self`) or, without code, removes the first. Of a loop: `passes` makes the loop of CODE of it, whose
    inner loops have the parts of its body.
    """

    kind: Kind
    node: ast.expr | ast.stmt
    code: str = ""
    name: str = ""


def available() -> None:
    """Check that LibCST, which edits files, is installed.

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


def diff(path: Path, before: str, after: str) -> str:
    """Return the unified diff of two texts of a file."""
    texts = before.splitlines(True), after.splitlines(True)
    lines = difflib.unified_diff(*texts, str(path), str(path))
    last = "\n\\ No newline at end of file\n"
    return "".join(line if line.endswith("\n") else line + last for line in lines)


def overwrite(path: Path, text: str, encoding: str) -> None:
    """Replace the text of a file atomically; its mode stays.

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
