"""Write findings as text, JSON, SARIF 2.1.0, or annotations for GitHub Actions."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from lockstep.tools.check.engine import CheckResult, Finding
from lockstep.tools.check.rules import RULES
from lockstep.version import __version__


def text(outcome: CheckResult) -> str:
    """Return one line for each finding and note, and a last line with the number of findings."""
    lines = [line(finding) for finding in outcome.findings]
    lines += [f"note: {note}" for note in outcome.notes]
    count = len(outcome.findings)
    if not count:
        return "\n".join([*lines, "No findings."])
    fixable = sum(finding.fixable for finding in outcome.findings)
    mended = f", {fixable} of which --fix mends" if fixable else ""
    return "\n".join([*lines, f"{count} finding{'s' * (count > 1)}{mended}."])


def line(finding: Finding) -> str:
    """Return one finding as a line of text."""
    cell = "" if finding.cell is None else f":cell {finding.cell}"
    place = f"{finding.path}{cell}:{finding.line}:{finding.column}"
    return f"{place}: {finding.code}{' [*]' * finding.fixable} {finding.message}"


def as_json(outcome: CheckResult) -> str:
    """Return the findings as a JSON array of objects."""
    rows = [
        {
            "path": str(finding.path),
            "cell": finding.cell,
            "line": finding.line,
            "column": finding.column,
            "end_line": finding.end,
            "code": finding.code,
            "name": RULES[finding.code].name if finding.code in RULES else "",
            "message": finding.message,
            "harm": finding.harm,
            "fix": RULES[finding.code].fix if finding.fixable else None,
        }
        for finding in outcome.findings
    ]
    return json.dumps(rows, indent=1)


def sarif(outcome: CheckResult) -> str:
    """Return the findings as a SARIF 2.1.0 log, a format for code scanning services."""
    rules = [
        {
            "id": code,
            "name": rule.name,
            "shortDescription": {"text": rule.message},
            "fullDescription": {"text": rule.why},
            "help": {"text": f"{rule.why}\n\nUse instead:\n\n{rule.good}"},
        }
        for code, rule in RULES.items()
    ]
    driver = {"name": "lockstep check", "version": __version__, "rules": rules}
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": [_result(finding) for finding in outcome.findings],
    }
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=1)


def _result(finding: Finding) -> dict[str, Any]:
    region = {"startLine": finding.line, "startColumn": finding.column, "endLine": finding.end}
    location = {"artifactLocation": {"uri": quote(finding.path.as_posix())}, "region": region}
    return {
        "ruleId": finding.code,
        "level": _level(finding),
        "message": {"text": _in_cell(finding)},
        "locations": [{"physicalLocation": location}],
    }


def github(outcome: CheckResult) -> str:
    """Return the findings as `::error` lines, which GitHub Actions shows as notes beside the code."""
    lines = []
    for finding in outcome.findings:
        values = {
            "title": f"lockstep check ({finding.code})",
            "file": finding.path,
            "line": finding.line,
            "col": finding.column,
            "endLine": finding.end,
        }
        properties = ",".join(f"{key}={_escaped(value, ':,')}" for key, value in values.items())
        message = _escaped(f"{finding.code} {_in_cell(finding)}")
        lines.append(f"::{_level(finding)} {properties}::{message}")
    return "\n".join(lines)


def _escaped(value: object, letters: str = "") -> str:
    """Escape percent signs, line ends and the characters in `letters` for an `::error` line of GitHub."""
    escapes = {ord(letter): f"%{ord(letter):02X}" for letter in f"%\r\n{letters}"}
    return str(value).translate(escapes)


def _level(finding: Finding) -> str:
    """Return the severity of a finding for SARIF and GitHub: `error` or `warning`."""
    return "error" if finding.harm in ("hangs", "corrupts", "fails") else "warning"


def _in_cell(finding: Finding) -> str:
    """Return a finding's message; in a notebook, preceded by the number of the cell."""
    return finding.message if finding.cell is None else f"cell {finding.cell}: {finding.message}"


FORMS = {"text": text, "json": as_json, "sarif": sarif, "github": github}
