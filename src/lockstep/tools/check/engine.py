"""Run rules over files: findings, notes, and the edits that fix them."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.errors import ScriptNotFoundError, UsageError
from lockstep.tools.check import config
from lockstep.tools.check.config import Selection
from lockstep.tools.check.fix import Edit
from lockstep.tools.check.project import Project
from lockstep.tools.check.rules import RULES, SYNTAX, UNKNOWN, Harm, Hit
from lockstep.tools.check.script import Script
from lockstep.tools.check.source import Module, dotted

#: Directories that hold no scripts of the user's.
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist", "venv"}
_SUFFIXES = (".py", ".ipynb")


@dataclass(frozen=True)
class Finding:
    """One line of the outcome; line and column are counted from 1.

    Attributes:
        path: the file, as it was given.
        line: of a notebook, the line in its cell.
        cell: the number of the notebook's cell.
        end: the last line of what was found.
        harm: what comes of it.
        fixable: whether `--fix` would mend it.
    """

    path: Path
    line: int
    column: int
    end: int
    code: str
    message: str
    harm: Harm
    cell: int | None = None
    fixable: bool = False


@dataclass
class Outcome:
    """What a check has found.

    Attributes:
        findings: by file, line and column.
        notes: what could not be judged.
        edits: of each file that could be mended, its module and the edits.
    """

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    edits: dict[Path, tuple[Module, list[Edit]]] = field(default_factory=dict)


def files(paths: Iterable[Path]) -> list[Path]:
    """Return the files that paths name: a file itself, of a directory all scripts and notebooks.

    Raises:
        UsageError: if a path is not there, or a directory has none.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise ScriptNotFoundError(f"{path} does not exist; expected a file or a directory")
        if path.is_file():
            found[path] = None
            continue
        inside = [file for file in sorted(path.rglob("*")) if _is_script(file.relative_to(path))]
        inside = [file for file in inside if file.is_file()]
        if not inside:
            raise UsageError(f"{path}: no *.py and no *.ipynb below it; expected at least one")
        found.update(dict.fromkeys(inside))
    return list(found)


def _is_script(path: Path) -> bool:
    hidden = any(part.startswith(".") or part in _SKIPPED for part in path.parts)
    return path.suffix in _SUFFIXES and not hidden


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Look for no garbage: the trees stay to the end, and going over them takes a third of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@_without_collections()
def check(paths: Sequence[Path], flags: Selection | None = None) -> Outcome:
    """Check files.

    Args:
        paths: files, as `files` returns them.
        flags: which rules run, where flags say so.

    Raises:
        UsageError: if a file cannot be read, or a pyproject.toml is wrong.
    """
    project, outcome = Project(), Outcome()
    modules = []
    for path in paths:
        try:
            modules.append((path, project.load(path)))
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    shared: Script | None = None
    for path, module in modules:
        selection = config.of_file(path, flags or Selection())
        script = shared = Script(project, module) if shared is None else shared.of(module)
        outcome.findings += sorted(
            _findings(path, script, selection, outcome),
            key=lambda one: (one.cell or 0, one.line, one.column, one.code),
        )
    return outcome


def _findings(
    path: Path, script: Script, selection: Selection, outcome: Outcome
) -> Iterator[Finding]:
    module = script.module
    for broken in module.broken:
        cell, line = module.place(broken.line)
        yield Finding(path, line, broken.column, line, SYNTAX, broken.message, "fails", cell)
    if selection.has(UNKNOWN):
        yield from _unknown_codes(path, module)
    if not module.broken and script.flavours and not script.trains:
        outcome.notes += _no_loop(path, script)
    edits: list[Edit] = []
    for code, rule in RULES.items():
        if not selection.has(code) or not script.flavours:
            continue
        for hit in dict.fromkeys(rule.find(script)):
            if _ignored(module, hit, code) or _in_one_process(module, hit):
                continue
            edits += () if module.cells else hit.edits
            cell, line = module.place(hit.node.lineno)
            text = hit.message or rule.message
            column = _column(module, hit)
            end = line + (hit.node.end_lineno or hit.node.lineno) - hit.node.lineno
            fixable = bool(hit.edits) and not module.cells
            harm = hit.harm or rule.harm
            yield Finding(path, line, column, end, code, text, harm, cell, fixable)
    if edits:
        outcome.edits[path] = module, edits


def _column(module: Module, hit: Hit) -> int:
    line = module.text.split("\n")[hit.node.lineno - 1].encode()
    return len(line[: hit.node.col_offset].decode()) + 1


def _ignored(module: Module, hit: Hit, code: str) -> bool:
    """Whether a comment on the first or the last line of a place, or of its statement, says so."""
    if not module.ignored:
        return False
    lines = {hit.node.lineno, hit.node.end_lineno}
    statement = module.statement(hit.node)
    if statement is not None and not hasattr(statement, "body"):
        lines |= {statement.lineno, statement.end_lineno}
    said = [module.ignored[line] for line in lines if line in module.ignored]
    return any(codes is None or code in codes for codes in said)


def _in_one_process(module: Module, hit: Hit) -> bool:
    """Whether a place is in a plain unit test, which runs in one process whatever the program does."""
    owner = module.enclosing_class(hit.node)
    bases = [] if owner is None else [dotted(base).rpartition(".")[2] for base in owner.bases]
    return "TestCase" in bases


def _unknown_codes(path: Path, module: Module) -> Iterator[Finding]:
    for number, codes in module.ignored.items():
        for code in sorted(codes or ()):
            if code not in RULES:
                cell, line = module.place(number)
                message = f"the comment ignores {code}, and no rule has this code"
                yield Finding(path, line, 1, line, UNKNOWN, message, "misleads", cell)


def _no_loop(path: Path, script: Script) -> Iterator[str]:
    """Say of a script that starts a process group that no loop was found to judge its steps by."""
    starts = any(script.calls("dist.init_process_group", "Accelerator", "Fabric", "lockstep.Run"))
    if starts and script.says(r"\boptim\b|[Oo]ptimizer"):
        yield (
            f"{path}: no training loop found, so the rules about steps did not run; looked for a for or "
            "while loop with .backward() in it, or in a function that it calls, in this file and the "
            "project's modules that it imports"
        )
