"""Findings as text, JSON, SARIF 2.1.0 and annotations of GitHub."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from lockstep.tools.check.engine import Finding, Outcome
from lockstep.tools.check.rules import RULES
from lockstep.version import __version__

#: Harms that SARIF and GitHub show as errors.
SEVERE = ("hangs", "corrupts", "fails")
#: Letters that a workflow command escapes in its message, and in the values of its properties.
_IN_MESSAGE, _IN_VALUE = "%\r\n", "%\r\n:,"


def text(outcome: Outcome) -> str:
    """Return a line for each finding, and how many there are."""
    lines = [line(finding) for finding in outcome.findings]
    lines += [f"note: {note}" for note in outcome.notes]
    count = len(outcome.findings)
    if not count:
        return "\n".join([*lines, "No findings."])
    fixable = sum(finding.fixable for finding in outcome.findings)
    mended = f", {fixable} of which --fix mends" if fixable else ""
    return "\n".join([*lines, f"{count} finding{'s' * (count > 1)}{mended}."])


def line(finding: Finding) -> str:
    """Return the line of one finding."""
    cell = "" if finding.cell is None else f":cell {finding.cell}"
    place = f"{finding.path}{cell}:{finding.line}:{finding.column}"
    return f"{place}: {finding.code}{' [*]' * finding.fixable} {finding.message}"


def as_json(outcome: Outcome) -> str:
    """Return the findings as a JSON array of objects."""
    rows = [
        {
            "path": str(one.path),
            "cell": one.cell,
            "line": one.line,
            "column": one.column,
            "end_line": one.end,
            "code": one.code,
            "name": _name(one.code),
            "message": one.message,
            "harm": one.harm,
            "fix": RULES[one.code].fix if one.fixable else None,
        }
        for one in outcome.findings
    ]
    return json.dumps(rows, indent=1)


def _name(code: str) -> str:
    return RULES[code].name if code in RULES else ""


def sarif(outcome: Outcome) -> str:
    """Return the findings as a SARIF 2.1.0 log, which code scanning services read."""
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
        "results": [_result(one) for one in outcome.findings],
    }
    log = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [run],
    }
    return json.dumps(log, indent=1)


def _result(finding: Finding) -> dict[str, Any]:
    region = {"startLine": finding.line, "startColumn": finding.column, "endLine": finding.end}
    cell = "" if finding.cell is None else f"cell {finding.cell}: "
    uri = quote(finding.path.as_posix())
    location = {"artifactLocation": {"uri": uri}, "region": region}
    return {
        "ruleId": finding.code,
        "level": "error" if finding.harm in SEVERE else "warning",
        "message": {"text": cell + finding.message},
        "locations": [{"physicalLocation": location}],
    }


def github(outcome: Outcome) -> str:
    """Return the findings as workflow commands, which GitHub shows beside the lines."""
    return "\n".join(_annotations(outcome.findings))


def _annotations(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for one in findings:
        level = "error" if one.harm in SEVERE else "warning"
        values = {
            "title": f"lockstep check ({one.code})",
            "file": str(one.path),
            "line": one.line,
            "col": one.column,
            "endLine": one.end,
        }
        given = ",".join(
            f"{key}={_escaped(str(value), _IN_VALUE)}" for key, value in values.items()
        )
        cell = "" if one.cell is None else f"cell {one.cell}: "
        message = _escaped(f"{one.code} {cell}{one.message}", _IN_MESSAGE)
        lines.append(f"::{level} {given}::{message}")
    return lines


def _escaped(value: str, letters: str) -> str:
    return "".join(f"%{ord(letter):02X}" if letter in letters else letter for letter in value)


FORMS = {"text": text, "json": as_json, "sarif": sarif, "github": github}
