"""All refusals and failures that the code has a message for: a section of the manual's page of errors.

`python -m tests.errors_page` writes it.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from lockstep import errors
from tests.ports import ROOT

PAGE = ROOT / "docs/manual/errors.md"
#: The headings of the list, each with the parts of the package whose messages it has.
PARTS = {
    "lockstep.Run: the loop": ("run.py", "engine/training", "engine/recovery", "engine/layout"),
    "lockstep.Run: strategies and exchanges": (
        "engine/strategies",
        "engine/exchange",
        "engine/parameter_server",
    ),
    "lockstep.Run: data": ("engine/data",),
    "lockstep.Run: saved state and records": ("state",),
    "lockstep.Run: trainers of other frameworks": ("integrations",),
    "lockstep run and lockstep.launch": ("launch", "world", "cli/run.py", "cli/nodes.py"),
    **{
        f"lockstep {verb}": (f"tools/{verb}", f"cli/{verb}.py")
        for verb in (
            "submit",
            "verify",
            "check",
            "convert",
            "doctor",
            "replay",
            "diff",
            "attest",
            "branch",
        )
    },
    "lockstep bench": ("tools/bench", "cli/bench.py", "tools/quantities.py"),
    "lockstep export": ("cli/export.py",),
    "lockstep report": ("tools/report", "cli/report.py"),
    "lockstep watch": ("tools/watch", "cli/watch.py"),
}
_REST = "Settings and commands"
#: In the page, the section stands between these two lines.
_PLACE = re.compile(r"(?<=<!-- all messages -->\n).*?(?=<!-- end -->)", re.DOTALL)
_KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, errors.LockstepError)
}


def written(page: str) -> str:
    """Return the page with the messages of now."""
    return _PLACE.sub(lambda _: _section(), page)


def messages() -> dict[str, dict[str, str]]:
    """Return each message and its hint, by the name of its error."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for (_, kind, message), hint in _all().items():
        found[kind][message] = max(hint, found[kind].get(message, ""))
    return found


def _all() -> dict[tuple[str, str, str], str]:
    """Return each hint by its heading, error and message."""
    found: dict[tuple[str, str, str], str] = {}
    source = ROOT / "src/lockstep"
    for file in sorted(source.rglob("*.py")):
        part = _part(str(file.relative_to(source)))
        for kind, message, hint in _made(ast.parse(file.read_text())):
            key = part, kind, message
            found[key] = max(hint, found.get(key, ""))
    return found


def _part(file: str) -> str:
    return next((part for part, places in PARTS.items() if file.startswith(places)), _REST)


def _made(tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    """Yield the error, the message and the hint of each place that makes one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            hints = [_text(one.value) for one in node.keywords if one.arg == "hint"]
            message = _shown(_text(node.args[0]))
            if node.func.id in _KINDS and message.strip(" …:0"):
                yield node.func.id, message, _shown(*hints)


def _shown(text: str = "") -> str:
    words = re.sub(r"\s+", " ", text).strip().replace("|", "\\|").replace("`", "'")
    return words if words.strip(" …/") else ""


def _text(node: ast.expr) -> str:
    """Return what a message says, with `…` for what is put in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(map(_text, parts))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _text(left) + _text(right)
        case ast.IfExp(body=body, orelse=other):
            return f"{_text(body)} / {_text(other)}"
    return "…"


def _section() -> str:
    lines, found = [], _all()
    for heading in (*PARTS, _REST):
        rows = sorted(
            f"| `{message}`{hint and f'<br>→ `{hint}`'} | `{kind}`: {_KINDS[kind].exit_code} |"
            for (part, kind, message), hint in found.items()
            if part == heading
        )
        if rows:
            lines += [
                f"### {heading}",
                "",
                "| message | error: exit code |",
                "| --- | --- |",
                *rows,
                "",
            ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
