"""Conversion of a script: all edits and questions applied, or a refusal."""

from __future__ import annotations

import ast
import difflib
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ScriptNotFoundError, UsageError
from lockstep.tools.check import engine, fix
from lockstep.tools.check.config import Selection
from lockstep.tools.check.fix import Edit
from lockstep.tools.check.project import Project
from lockstep.tools.check.script import Script
from lockstep.tools.check.source import Module
from lockstep.tools.convert import (
    carried,
    data,
    decisions,
    home,
    loops,
    losses,
    models,
    passes,
    precision,
    processes,
    ranks,
    saving,
    unused,
)
from lockstep.tools.convert.draft import REPLICAS, RUN, Draft
from lockstep.tools.convert.questions import MARK

#: What turns facts into edits and questions, in this order.
_PARTS = (
    processes, ranks, precision, models, data, loops, losses, passes, carried, decisions, saving,
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """What could not be decided.

    Attributes:
        before: the line in the script as it was.
        after: the line of the comment in the converted script.
        text: the question.
    """

    before: int
    after: int
    text: str


@dataclass(frozen=True)
class Converted:
    """What came of a script.

    Attributes:
        module: the script as it was.
        text: the converted script.
        questions: by line.
        notes: what changed its meaning, and is no question.
    """

    module: Module
    text: str
    questions: list[Question]
    notes: list[str]

    @property
    def changed(self) -> int:
        """How many lines go, come or have changed by more than their indentation."""
        blocks = _blocks(self.module.text, self.text)
        return sum(max(b - a, d - c) for kind, a, b, c, d in blocks if kind != "equal")


def convert(path: Path) -> Converted:
    """Convert a script.

    Raises:
        UsageError: if it cannot be read as Python 3, is no script of one device or of DDP, or has no
            training loop.
    """
    fix.available()
    from lockstep.tools.check import editor

    script = _read(path)
    draft = Draft(script)
    for part in _PARTS:
        part.convert(draft)
    edits = _placed(draft)
    text = editor.apply(draft.module, edits)
    compile(text, str(path), "exec")
    text, found = _checked(draft, text)
    return Converted(draft.module, text, _questions(draft, text) + found, draft.notes)


def _checked(draft: Draft, text: str) -> tuple[str, list[Question]]:
    """Ask what `lockstep check` finds in a converted script: what a resume loses, work per microbatch."""
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / draft.module.path.name
        file.write_text(text, encoding="utf-8")
        findings = engine.check(
            [file], Selection(("LS601", "LS602", "LS605", "LS609", "LS610"))
        ).findings
    lines, found = text.split("\n"), []
    number = _numbers(draft.module.text, text)
    for one in sorted(findings, key=lambda one: -one.line):
        line = lines[one.line - 1]
        asked = f"{one.code}: {one.message}"
        end = line[len(line.rstrip("\r")) :]
        lines.insert(one.line - 1, f"{line[: len(line) - len(line.lstrip())]}{MARK}{asked}{end}")
        found.append(Question(number[one.line - 1], one.line, asked))
    shifted = [
        Question(one.before, one.after + index, one.text)
        for index, one in enumerate(reversed(found))
    ]
    return "\n".join(lines), shifted


def _numbers(before: str, after: str) -> list[int]:
    """Return, of each line of a converted script, the number of the line that it comes from."""
    numbers: list[int] = []
    for _, a, b, c, d in _blocks(before, after):
        numbers += [max(min(a + n, b - 1), 0) + 1 for n in range(d - c)]
    return numbers


def _blocks(before: str, after: str) -> list[tuple[str, int, int, int, int]]:
    """Return which lines of two texts are the same but for their indentation."""
    old, new = ([line.strip() for line in text.splitlines()] for text in (before, after))
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    return [(kind, a, b, c, d) for kind, a, b, c, d in blocks]


def _read(path: Path) -> Script:
    if not path.is_file():
        raise ScriptNotFoundError(f"{path} is not there, or is no file; expected a script")
    if path.suffix == ".ipynb":
        raise UsageError(
            f"{path} is a notebook; expected a script",
            hint="jupyter nbconvert --to script writes one",
        )
    project = Project()
    try:
        module = project.load(path)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    for broken in module.errors:
        raise UsageError(f"{path}:{broken.line}:{broken.column}: {broken.message}")
    script = Script(project, module)
    if "lockstep" in script.flavours:
        raise UsageError(f"{path} makes a lockstep.Run: it is a Lockstep script already")
    if others := script.flavours & {"accelerate", "fabric"}:
        raise UsageError(
            f"{path} is a script of {' and '.join(sorted(others))}; expected one for a single device or of "
            "DistributedDataParallel"
        )
    _check_loop(path, script)
    return script


def _check_loop(path: Path, script: Script) -> None:
    if script.step_loops:
        return
    for one in script.program:
        if one.step_loops:
            raise UsageError(
                f"the training loop is in {one.module.path}, which {path} imports; expected it in the "
                "script",
                hint="move it there, or change it by hand (manual, training)",
            )
    raise UsageError(
        f"{path}: no training loop found; looked for a for or while loop with .backward() in it, or in a "
        "function that it calls"
    )


def _placed(draft: Draft) -> list[Edit]:
    """Return all edits, with the run where it is needed."""
    module = draft.module
    unused.clear(draft)
    removed = {node for one in draft.removed for node in ast.walk(one)}
    draft.edits = [edit for edit in draft.edits if edit.node not in removed]
    needing: list[ast.AST] = [edit.node for edit in draft.edits if RUN in edit.code]
    needing += [one for one in draft.inside if one not in removed]
    needing = needing or list(draft.script.step_loops[:1])
    place = home.find(draft, needing)
    processes.in_home(draft, place)
    processes.seeds(draft, place)
    unused.imports(draft)
    name = "run" if "run" not in _names(module) else "lockstep_run"
    edits = home.spread(draft, place, name)
    called = re.sub(r"\W+", "-", module.path.stem.lower()).strip("-_") or "run"
    start = place.block[place.start]
    code = f'lockstep.Run("{called}", seed={draft.seed}, replicas={REPLICAS}{draft.precision}) as {name}'
    last = _last_import(module, start)
    head = [
        Edit("with", start, code),
        *(Edit("after", last, one) for one in ("import lockstep", *draft.imports)),
    ]
    asked = [
        Edit("comment", statement, f"{MARK}{text}")
        for statement, texts in draft.questions.items()
        for text in texts
        if statement not in draft.removed
    ]
    return [*head, *asked, *edits, *(Edit("delete", one) for one in draft.removed)]


def _names(module: Module) -> set[str]:
    """Return the names of variables, parameters and functions of a file."""
    found = {node.id for node in ast.walk(module.tree) if isinstance(node, ast.Name)}
    found |= {node.arg for node in ast.walk(module.tree) if isinstance(node, ast.arg)}
    return found | {one.name for one in module.functions} | set(module.imports)


def _last_import(module: Module, start: ast.stmt) -> ast.stmt:
    """Return the last of the imports at the head of the file."""
    found = None
    for statement in module.tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            found = statement
        elif found is not None and not isinstance(statement, ast.Expr):
            break
    return found or start


def _questions(draft: Draft, text: str) -> list[Question]:
    """Return the questions with their lines before and after."""
    left = sorted(
        (statement.lineno, one)
        for statement, texts in draft.questions.items()
        for one in texts
        if statement not in draft.removed
    )
    lines = text.split("\n")
    found = []
    for before, one in left:
        after = next((n for n, line in enumerate(lines, 1) if line.strip() == MARK + one), 0)
        if after:
            lines[after - 1] = ""
        found.append(Question(before, after, one))
    return found
