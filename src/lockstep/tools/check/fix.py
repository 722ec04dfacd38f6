"""Define edits that keep a script's comments and formatting; `editor.py` applies the edits."""

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

#: Text of a string statement that marks where the next part of a loop's body begins.
PART = "lockstep: the next part"
Kind = Literal[
    "argument", "replace", "prepend", "wrap", "unwrap", "receiver",
    "statement", "first", "before", "after", "guard",
    "delete", "splice", "with", "parameter", "comment", "passes",
]  # fmt: skip


@dataclass(frozen=True)
class Edit:
    """One change of the expression or statement `node`; `kind` says how `code` changes it.

    Kinds for a call: `argument` sets the keyword `name`, or removes it if there is no code. `prepend` adds
    an argument before the others. `unwrap` replaces the call by its first argument, or an attribute by its
    object. `receiver` turns a method call into a function call with the object as argument. Kinds for any
    expression: `replace` replaces it. `wrap` makes it the argument of a call.

    Kinds for a statement: `statement` replaces it. `before` and `after` add a statement beside it. `guard`
    puts it under `if CODE:`. `with` puts it and all later statements of its block under `with CODE:`.
    `delete` removes it. `comment` adds a comment above it. `splice` replaces an `if` by its body. `first`
    adds a statement at the head of a loop's or a function's body. `parameter` adds a function parameter
    before the others (after `self`), or removes the first one if there is no code. `passes` replaces a loop
    by the loop in the code, whose inner loops get the parts of the replaced loop's body.
    """

    kind: Kind
    node: ast.expr | ast.stmt
    code: str = ""
    name: str = ""


def available() -> None:
    """Raise an error unless LibCST, which edits files, is installed.

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
    """Return the unified diff from the text `before` to the text `after` of the file `path`."""
    texts = before.splitlines(True), after.splitlines(True)
    lines = difflib.unified_diff(*texts, str(path), str(path))
    last = "\n\\ No newline at end of file\n"
    return "".join(line if line.endswith("\n") else line + last for line in lines)


def overwrite(path: Path, text: str, encoding: str) -> None:
    """Replace the text of the file `path` atomically; the file keeps its permissions.

    Raises:
        OutputError: if the file cannot be written.
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
