"""Diffs of the manual and the README: a loop without Lockstep, and the same loop with it.

`python -m tests.ports` writes them into their pages.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / name for name in ("docs/manual/examples.md", "docs/manual/migrate.md", "README.md")]
#: In a page, a diff stands between these two lines; a name is an example, or a file of examples/migrate.
_PLACE = re.compile(r"(?<=<!-- port of )([\w/]+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
_CONTEXT = 1


def written(page: str) -> str:
    """Return the page with the diffs of now."""
    return _PLACE.sub(lambda found: found[1] + found[2] + _section(found[1]), page)


def names(page: str) -> list[str]:
    """Return the examples whose diffs are in the page."""
    return [found[1] for found in _PLACE.finditer(page)]


def files(name: str) -> tuple[Path, Path]:
    """Return the file without Lockstep and the one with it."""
    if name.startswith("migrate/"):
        return EXAMPLES / f"{name}.py", EXAMPLES / "migrate/with_lockstep.py"
    return EXAMPLES / f"plain_{name}.py", EXAMPLES / f"{name}.py"


def _section(name: str) -> str:
    if name.startswith("migrate/"):
        whole = list(_diff(*map(_loop, files(name)), context=1000))[1:]
        return "\n".join(["```diff", *whole, "```\n"])
    plain, port = map(_code, files(name))
    lines = list(_diff(plain, port))
    added, gone = (
        sum(line[:1] == sign and line[1:].strip() != "" for line in lines) for sign in "+-"
    )
    count = sum(line.strip() != "" for line in plain)
    links = f"[`plain_{name}.py`](../../examples/plain_{name}.py)"
    return f"Of {count} lines of {links}, {gone} go and {added} come:\n\n```diff\n" + "\n".join(
        [*lines, "```\n"]
    )


def _code(file: Path) -> list[str]:
    """Return the lines of a script below its docstring."""
    text = file.read_text()
    docstring = ast.parse(text).body[0]
    return text.splitlines()[docstring.end_lineno :]


def _loop(file: Path) -> list[str]:
    """Return the lines of a script below its docstring and its imports."""
    text = file.read_text()
    kinds = (ast.Expr, ast.Import, ast.ImportFrom)
    first = next(node for node in ast.parse(text).body if not isinstance(node, kinds))
    return text.splitlines()[first.lineno - 1 :]


def _diff(plain: list[str], port: list[str], context: int = _CONTEXT) -> Iterator[str]:
    """Yield a unified diff that passes over indentation: all lines stand where the port has them."""
    matcher = difflib.SequenceMatcher(
        None, *([line.strip() for line in lines] for lines in (plain, port)), autojunk=False
    )
    shift = 0
    for group in matcher.get_grouped_opcodes(context):
        yield "@@"
        for kind, start, end, first, last in group:
            if kind == "equal":
                yield from (f" {line}".rstrip() for line in port[first:last])
            if kind in ("equal", "replace") and port[first].strip():
                shift = max(0, _indent(port[first]) - _indent(plain[start]))
            if kind != "equal":
                yield from (f"-{' ' * shift}{line}".rstrip() for line in plain[start:end])
                yield from (f"+{line}" for line in port[first:last])


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


if __name__ == "__main__":
    for one in PAGES:
        one.write_text(written(one.read_text()))
