"""Convert a script: collect all edits and questions and apply them, or raise an error."""

from __future__ import annotations

import ast
import difflib
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import ScriptNotFoundError, UsageError
from lockstep.tools.check import engine, fix
from lockstep.tools.check.config import Selection
from lockstep.tools.check.engine import QUESTION
from lockstep.tools.check.fix import Edit
from lockstep.tools.check.project import Project
from lockstep.tools.check.script import Script
from lockstep.tools.check.source import Module
from lockstep.tools.check.syntax import dotted, variables
from lockstep.tools.convert import (
    adapters,
    carried,
    data,
    ddp,
    decisions,
    loops,
    losses,
    models,
    passes,
    precision,
    ranks,
    run_scope,
    saving,
    unused,
)
from lockstep.tools.convert.draft import REPLICAS, RUN, Draft

#: The modules that add edits and questions to a draft, in this order.
_PARTS = (
    ddp, ranks, precision, models, data, loops, losses, passes, carried, decisions, saving,
)  # fmt: skip


@dataclass(frozen=True)
class Question:
    """A question to the user: its line in the original script, its line in the converted one, its text."""

    before: int
    after: int
    text: str


@dataclass(frozen=True)
class ConvertedScript:
    """A converted script: the original, its new text, questions to the user, and notes.

    A note tells of a change in what the script computes, such as a larger batch; it needs no answer.
    """

    module: Module
    text: str
    questions: list[Question]
    notes: list[str]

    @property
    def changed(self) -> int:
        """Number of lines that are added, removed, or changed by more than their indentation."""
        blocks = _blocks(self.module.text, self.text)
        return sum(max(b - a, d - c) for kind, a, b, c, d in blocks if kind != "equal")


def convert(path: Path) -> ConvertedScript:
    """Convert the script at `path`, without changing the file; return its new text, questions and notes.

    Raises:
        UsageError: if the script is not Python 3, is neither for one device nor of DDP, or has no
            training loop.
    """
    fix.available()
    from lockstep.tools.check import editor

    script = _read(path)
    if (adapted := adapters.convert(script)) is not None:
        return ConvertedScript(script.module, adapted[0], [], adapted[1])
    _check_loop(script, path)
    draft = Draft(script)
    for part in _PARTS:
        part.convert(draft)
    edits = _placed(draft)
    text = editor.apply(draft.module, edits)
    compile(text, str(path), "exec")
    text, found = _checked(draft, text)
    return ConvertedScript(draft.module, text, _questions(draft, text) + found, draft.notes)


def _checked(draft: Draft, text: str) -> tuple[str, list[Question]]:
    """Run `lockstep check` on the converted `text`; return the text with its findings, and questions.

    Each finding becomes a comment in the text, and a question to the user.
    """
    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / draft.module.path.name
        file.write_text(text, encoding="utf-8")
        rules = Selection(("LS601", "LS602", "LS605", "LS609", "LS610"))
        findings = engine.check([file], rules).findings
    lines = text.split("\n")
    numbers: list[int] = []  # for each line, the line of the original script
    for _, a, b, c, d in _blocks(draft.module.text, text):
        numbers += [max(min(a + n, b - 1), 0) + 1 for n in range(d - c)]
    found = []
    for index, finding in enumerate(sorted(findings, key=lambda one: one.line)):
        line = lines[finding.line - 1 + index]
        indent, end = line[: len(line) - len(line.lstrip())], line[len(line.rstrip("\r")) :]
        asked = f"{finding.code}: {finding.message}"
        lines.insert(finding.line - 1 + index, f"{indent}{QUESTION}{asked}{end}")
        found.append(Question(numbers[finding.line - 1], finding.line + index, asked))
    return "\n".join(lines), found


def _blocks(before: str, after: str) -> Sequence[tuple[str, int, int, int, int]]:
    """Return the opcodes of difflib's SequenceMatcher for the lines of two texts, without indentation."""
    old, new = ([line.strip() for line in text.splitlines()] for text in (before, after))
    return difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()


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
    script = Script(project, module, {})
    if "lockstep" in script.flavours:
        raise UsageError(f"{path} makes a lockstep.Run: it is a Lockstep script already")
    return script


def _check_loop(script: Script, path: Path) -> None:
    """Raise `UsageError` unless the script at `path` itself has a training loop of plain PyTorch.

    Scripts of Lightning Fabric raise it, too.
    """
    if "fabric" in script.flavours:
        raise UsageError(
            f"{path} is a script of fabric; expected one for a single device or of DistributedDataParallel"
        )
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
    """Return the draft's edits, with further edits that make the run and pass the run to functions.

    Unused code is removed, and the questions to the user become comments.
    """
    module = draft.module
    unused.clear(draft)
    removed = {node for one in draft.removed for node in ast.walk(one)}
    draft.edits = [edit for edit in draft.edits if edit.node not in removed]
    needing: list[ast.AST] = [edit.node for edit in draft.edits if RUN in edit.code]
    needing += [one for one in draft.within_run if one not in removed]
    needing = needing or list(draft.script.step_loops[:1])
    scope = run_scope.find(draft, needing)
    ddp.spawned(draft, scope)
    ddp.seeds(draft, scope)
    unused.imports(draft)
    taken = {one.arg for one in ast.walk(module.tree) if isinstance(one, ast.arg)}
    taken |= {dotted(variable) for variable in variables(module.tree)}
    taken |= {function.name for function in module.functions} | set(module.imports)
    name = "run" if "run" not in taken else "lockstep_run"
    edits = run_scope.pass_run(draft, scope, name)
    called = re.sub(r"\W+", "-", module.path.stem.lower()).strip("-_") or "run"
    start = scope.block[scope.start]
    code = f'lockstep.Run("{called}", seed={draft.seed}, replicas={REPLICAS}{draft.precision}) as {name}'
    last = _last_import(module) or start
    return [
        Edit("with", start, code),
        *(Edit("after", last, one) for one in ("import lockstep", *draft.imports)),
        *(Edit("comment", statement, f"{QUESTION}{text}") for statement, text in _left(draft)),
        *edits,
        *(Edit("delete", one) for one in draft.removed),
    ]


def _left(draft: Draft) -> list[tuple[ast.stmt, str]]:
    """Return (statement, question) pairs: the questions about statements that are not removed."""
    questions = draft.questions.items()
    return [(one, text) for one, texts in questions if one not in draft.removed for text in texts]


def _last_import(module: Module) -> ast.stmt | None:
    """Return the last of the import statements at the head of a file; `None` if there are none."""
    found = None
    for statement in module.tree.body:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            found = statement
        elif found is not None and not isinstance(statement, ast.Expr):
            break
    return found


def _questions(draft: Draft, text: str) -> list[Question]:
    """Return the questions to the user, each with its line in the original and in the converted `text`."""
    lines = [line.strip() for line in text.split("\n")]
    found = []
    for before, asked in sorted((statement.lineno, one) for statement, one in _left(draft)):
        comment = QUESTION + asked
        after = lines.index(comment) + 1 if comment in lines else 0
        if after:
            lines[after - 1] = ""
        found.append(Question(before, after, asked))
    return found
