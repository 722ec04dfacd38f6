"""`lockstep check`: find lines that break, hang or slow a distributed script, without running it."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.parser import Parser
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.tools.check.config import Selection
    from lockstep.tools.check.engine import CheckResult
    from lockstep.tools.check.source import Module

HELP = "find what breaks, hangs or slows a distributed script"
USAGE = "[options] PATH [PATH ...]"
EPILOG = """\
Rules are for scripts of torch.distributed, Accelerate, Fabric and Lockstep; other files are skipped.
`# lockstep: ignore[LS201]` on its line silences a finding; [tool.lockstep.check] in pyproject.toml has
select and ignore. Exit codes: 0 no findings, or all fixed; 1 findings, or with --diff something to fix;
2 usage.
"""
EXAMPLES = {
    "lockstep check train.py": "show what breaks, hangs or slows the script",
    "lockstep check --diff src": "show what --fix would change in all scripts of a directory",
    "lockstep check --explain LS201": "explain a rule",
}


def add_flags(parser: Parser) -> None:
    """Add the flags of `lockstep check` to its parser."""
    add = parser.add_argument
    add("paths", nargs="*", type=Path, metavar="PATH", help="scripts, notebooks, directories")
    add("--fix", action="store_true", help="apply the safe fixes")
    add("--diff", action="store_true", help="show what --fix would change, and change nothing")
    add("--select", metavar="CODE,…", help="run only these rules: codes, prefixes of codes, or ALL")
    add("--ignore", metavar="CODE,…", help="skip these rules")
    add(
        "--format",
        choices=("text", "json", "sarif", "github"),
        default="text",
        help="output format (default: text)",
    )
    add("--exit-zero", action="store_true", help="exit with 0 even if there are findings")
    add("--list", action="store_true", help="list all rules, and check nothing")
    add("--explain", metavar="CODE", help="explain a rule, and check nothing")


def handle(options: argparse.Namespace) -> int:
    """Check or edit the scripts, or list the rules, as `options` say; return the exit code."""
    if options.list or options.explain:
        return _print_rules(options.explain)
    from lockstep.tools.check import engine, fix
    from lockstep.tools.check.config import Selection
    from lockstep.tools.check.output import FORMS

    if not options.paths:
        raise UsageError("no PATH; expected at least one script, notebook or directory")
    if options.fix and options.diff:
        raise UsageError("--fix and --diff: expected one of them")
    if options.fix or options.diff:
        fix.available()
    select, ignore = (
        None if words is None else tuple(words.replace(",", " ").split())
        for words in (options.select, options.ignore)
    )
    flags = Selection(select, ignore or ())
    paths = engine.files(options.paths)
    outcome = engine.check(paths, flags)
    if options.diff:
        for path, module, text in _edited(outcome):
            sys.stdout.write(fix.diff(path, module.text, text))
        return int(bool(outcome.edits) and not options.exit_zero)
    if options.fix and outcome.edits:
        outcome = _fixed(outcome, paths, flags)
    if written := FORMS[options.format](outcome):
        print(written)
    for note in outcome.notes if options.format != "text" else ():
        print(f"note: {note}", file=sys.stderr)
    return int(bool(outcome.findings) and not options.exit_zero)


def _fixed(outcome: CheckResult, paths: list[Path], flags: Selection) -> CheckResult:
    """Apply the safe fixes of `outcome` to the files, check again, and return the new outcome.

    `paths` are the files to check, and `flags` the rules that the command line selects.
    """
    from lockstep.tools.check import engine, fix

    for path, module, text in _edited(outcome):
        fix.overwrite(path, text, module.encoding)
    before = Counter((one.path, one.code) for one in outcome.findings)
    outcome = engine.check(paths, flags)
    left = Counter((one.path, one.code) for one in outcome.findings)
    print(f"{(before - left).total()} fixed", file=sys.stderr)
    return outcome


def of_target(target: str, kind: str) -> list[str]:
    """Return lines about the hangs and wrong results that `lockstep check` finds in a script.

    There is one line for each, and a last one with their number. `target` is the path of a script or, if
    `kind` is `module`, the dotted name of a module.
    """
    from lockstep.tools.check import engine
    from lockstep.tools.check.output import line

    path = Path(target)
    if kind == "module":
        package = Path(*target.split("."), "__main__.py")
        path = package if package.is_file() else package.parent.with_suffix(".py")
    if not path.is_file() or path.suffix != ".py":
        return [f"lockstep: --check: {path} is no Python file; expected one"]
    findings = engine.check([path]).findings
    lines = [line(one) for one in findings if one.harm in ("hangs", "corrupts")]
    return [*lines, f"lockstep: check: {len(lines)} found that hang or corrupt in {path}"]


def _edited(outcome: CheckResult) -> Iterator[tuple[Path, Module, str]]:
    """Yield the path, the parsed module and the new text of each file that the fixes change.

    `outcome` is the result of a check, which contains the fixes.
    """
    from lockstep.tools.check import editor

    for path, (module, edits) in outcome.edits.items():
        yield path, module, editor.apply(module, edits)


def _print_rules(code: str | None) -> int:
    from lockstep.tools.check.rules import RULES

    if code is None:
        for rule in RULES.values():
            selected = "" if rule.default else " (if selected)"
            print(f"{rule.code} {rule.name}{selected}: {rule.message}")
        return 0
    if code not in RULES:
        raise UsageError(f"--explain {code}: no rule", hint="lockstep check --list shows all rules")
    rule = RULES[code]
    print(f"{rule.code} {rule.name}: {rule.message}\n\n{rule.why}\n")
    print(f"Example:\n\n{rule.bad}\nUse instead:\n\n{rule.good}", end="")
    return 0
