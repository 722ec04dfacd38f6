"""What changes from an example's form for one device to the example: the diffs of docs/manual/examples.md.

`python -m tests.ports` writes them into the page.
"""

from __future__ import annotations

import ast
import difflib
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/manual/examples.md"
#: In the page, a diff stands between these two lines.
_PLACE = re.compile(r"(?<=<!-- port of )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)
_CONTEXT = 1


def written(page: str) -> str:
    """Return the page with the diffs of now."""
    return _PLACE.sub(lambda found: found[1] + found[2] + _section(found[1]), page)


def names(page: str) -> list[str]:
    """Return the examples whose diffs are in the page."""
    return [found[1] for found in _PLACE.finditer(page)]


def _section(name: str) -> str:
    plain, port = (_code(ROOT / "examples" / f"{file}.py") for file in (f"plain_{name}", name))
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


def _diff(plain: list[str], port: list[str]) -> Iterator[str]:
    """Yield a unified diff that passes over indentation: common lines are those of the port."""
    matcher = difflib.SequenceMatcher(
        None, *([line.strip() for line in lines] for lines in (plain, port)), autojunk=False
    )
    for group in matcher.get_grouped_opcodes(_CONTEXT):
        yield "@@"
        for kind, start, end, first, last in group:
            if kind == "equal":
                yield from (f" {line}".rstrip() for line in port[first:last])
                continue
            yield from (f"-{line}" for line in plain[start:end])
            yield from (f"+{line}" for line in port[first:last])


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
