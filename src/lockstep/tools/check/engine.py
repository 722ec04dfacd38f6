"""Run the rules over files; return findings, notes, and the edits that fix findings."""

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
from lockstep.tools.check.rules import RULES, SYNTAX, UNKNOWN, Harm, Violation
from lockstep.tools.check.script import Script
from lockstep.tools.check.source import Module
from lockstep.tools.check.syntax import last_name

#: Names of directories without scripts of the user.
_SKIPPED = {"__pycache__", "node_modules", "site-packages", "build", "dist", "venv"}


@dataclass(frozen=True)
class Finding:
    """One place in a file that a rule reports.

    Lines and columns count from 1. In a notebook, lines count from the start of the cell.
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


#: Begins each question in a converted script.
QUESTION = "# lockstep: question: "


@dataclass
class CheckResult:
    """Result of `lockstep check`: findings, notes on what no rule looked at, and edits by file."""

    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    edits: dict[Path, tuple[Module, list[Edit]]] = field(default_factory=dict)


def files(paths: Iterable[Path]) -> list[Path]:
    """Return the files at `paths`; for a directory, all Python scripts and notebooks below it.

    Raises:
        UsageError: if a path does not exist, or a directory has no script.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if not path.exists():
            raise ScriptNotFoundError(f"{path} does not exist; expected a file or a directory")
        if path.is_file():
            found[path] = None
            continue
        inside = [
            file
            for file in sorted(path.rglob("*"))
            if file.suffix in (".py", ".ipynb")
            and not any(part[0] == "." or part in _SKIPPED for part in file.relative_to(path).parts)
            and file.is_file()
        ]
        if not inside:
            raise UsageError(f"{path}: no *.py and no *.ipynb below it; expected at least one")
        found.update(dict.fromkeys(inside))
    return list(found)


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Context manager that disables Python's garbage collector, since all syntax trees stay in use."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@_without_collections()
def check(paths: Sequence[Path], flags: Selection | None = None) -> CheckResult:
    """Run the rules that `flags` select over files; return findings, notes and edits.

    Raises:
        UsageError: if a file cannot be read, or a pyproject.toml is wrong.
    """
    project, outcome = Project(), CheckResult()
    modules = []
    for path in paths:
        try:
            modules.append((path, project.load(path)))
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    scripts: dict[Module, Script] = {}
    for path, module in modules:
        selection = config.of_file(path, flags or Selection())
        script = scripts.get(module) or Script(project, module, scripts)
        outcome.findings += sorted(
            _findings(path, script, selection, outcome),
            key=lambda one: (one.cell or 0, one.line, one.column, one.code),
        )
    return outcome


def _findings(
    path: Path, script: Script, selection: Selection, outcome: CheckResult
) -> Iterator[Finding]:
    module = script.module
    for error in module.errors:
        cell, line = module.place(error.line)
        yield Finding(path, line, error.column, line, SYNTAX, error.message, "fails", cell)
    if selection.has(UNKNOWN):
        yield from _unknown_codes(path, module)
    with_adapter = script.flavours == {"adapter"}
    if not (module.errors or with_adapter):
        outcome.notes += _notes(path, script)
    edits: list[Edit] = []
    selected = [rule for code, rule in RULES.items() if selection.has(code)]
    if with_adapter:  # the run deals data out, averages gradients and reduces what is logged
        selected = [rule for rule in selected if rule.code == "LS608"]
    elif script.flavours != {"lockstep"}:
        # Rules for Lockstep do not judge loops of other libraries.
        selected = [rule for rule in selected if not rule.code.startswith("LS6")]
    for rule in selected if script.flavours else ():
        for hit in dict.fromkeys(rule.find(script)):
            if _ignored(module, hit, rule.code) or _in_one_process(module, hit):
                continue
            (start, column), (end, _) = module.positions(hit.node)
            cell, line = module.place(start)
            text, harm = hit.message or rule.message, hit.harm or rule.harm
            offered = [hit.edit] if hit.edit and not module.cells else []
            edits += offered
            last, fixable = line + end - start, bool(offered)
            yield Finding(path, line, column + 1, last, rule.code, text, harm, cell, fixable)
    if edits:
        outcome.edits[path] = module, edits


def _ignored(module: Module, hit: Violation, code: str) -> bool:
    """Whether a `# lockstep: ignore` comment disables the rule `code` for the reported node of `hit`.

    The comment is on the first or last line of the node or of its statement.
    """
    if not module.ignored:
        return False
    lines = {hit.node.lineno, hit.node.end_lineno}
    statement = module.statement(hit.node)
    if statement is not None and not hasattr(statement, "body"):
        lines |= {statement.lineno, statement.end_lineno}
    comments = [module.ignored[line] for line in lines if line in module.ignored]
    return any(codes is None or code in codes for codes in comments)


def _in_one_process(module: Module, hit: Violation) -> bool:
    """Whether `hit` reports code in a `unittest.TestCase`, which runs in a single process."""
    owner = module.enclosing_class(hit.node)
    return owner is not None and "TestCase" in [last_name(base) for base in owner.bases]


def _unknown_codes(path: Path, module: Module) -> Iterator[Finding]:
    for number, codes in module.ignored.items():
        for code in sorted(codes or ()):
            if code not in RULES:
                cell, line = module.place(number)
                message = f"the comment ignores {code}, and no rule has this code"
                yield Finding(path, line, 1, line, UNKNOWN, message, "misleads", cell)


def _notes(path: Path, script: Script) -> Iterator[str]:
    """Yield notes on a script that rules cannot judge, and on open questions of `lockstep convert`."""
    starts = any(script.calls("dist.init_process_group", "Accelerator", "Fabric", "lockstep.Run"))
    imported = " ".join(script.module.imports.values())
    plain = "lockstep" not in imported and "torch.distributed" not in imported
    if script.trains and plain and not script.flavours:
        yield (
            f"{path}: no rule looked at it: it trains, and uses neither torch.distributed nor Lockstep "
            "(lockstep convert changes it into a Lockstep script)"
        )
    elif starts and not script.trains and script.matches(r"\boptim\b|[Oo]ptimizer"):
        yield (
            f"{path}: no training loop found, so the rules about steps did not run; looked for a for or "
            "while loop with .backward() in it, or in a function that it calls, in this file and the "
            "project's modules that it imports"
        )
    lines = script.module.text.splitlines()
    if asked := sum(line.lstrip().startswith(QUESTION) for line in lines):
        yield f"{path}: {asked} open question{'s' * (asked > 1)} of lockstep convert"
