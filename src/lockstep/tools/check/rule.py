"""Define `Rule`, the violations that a rule yields, and the decorator that registers rules."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from lockstep.tools.check.fix import Edit
from lockstep.tools.check.script import Script

#: Consequence of a finding: ranks wait for ever, weights or files are wrong, the script raises an error,
#: shown numbers mislead, or training is slow.
Harm = Literal["hangs", "corrupts", "fails", "misleads", "slow"]
#: Codes for files that cannot be parsed as Python, and for ignore comments with an unknown code.
SYNTAX, UNKNOWN = "LS001", "LS002"


@dataclass(frozen=True)
class Violation:
    """A syntax node that a rule reports; `message` and `harm` replace those of the rule if not `None`."""

    node: ast.expr | ast.stmt
    message: str | None = None
    edit: Edit | None = None
    harm: Harm | None = None


Finder = Callable[[Script], Iterator[Violation]]


@dataclass(frozen=True)
class Rule:
    """A rule of `lockstep check`: a function that finds violations, and texts about it for users.

    Attributes:
        code: such as `LS201`; the first digit is the number of the rule's family.
        name: in words, for the manual's headings.
        message: one line, shown with each place that the rule reports.
        harm: the consequence of a violation, such as `hangs`.
        why: the explanation in the manual.
        bad: code that the rule reports; `good` is correct code.
        fix: the effect of `--fix` in words, or empty.
        default: whether the rule runs if it is not selected by its code.
    """

    code: str
    name: str
    message: str
    harm: Harm
    why: str
    bad: str
    good: str
    find: Finder
    fix: str = ""
    default: bool = True


#: All rules, by code.
RULES: dict[str, Rule] = {}


def rule(
    code: str,
    name: str,
    message: str,
    harm: Harm,
    *,
    why: str,
    example: str,
    fix: str = "",
    default: bool = True,
) -> Callable[[Finder], Finder]:
    """Decorator that registers a function as the `find` of a new rule; the arguments are those of `Rule`.

    `example` is a diff: lines with `-` are only in the bad code, lines with `+` only in the good code.
    """
    lines = textwrap.dedent(example).strip("\n").splitlines()
    bad, good = (
        "".join(f"{line[2:]}\n" for line in lines if not line.startswith(other)) for other in "+-"
    )

    def enter(find: Finder) -> Finder:
        assert code not in RULES, code
        reason = " ".join(why.split())
        RULES[code] = Rule(code, name, message, harm, reason, bad, good, find, fix, default)
        return find

    return enter
