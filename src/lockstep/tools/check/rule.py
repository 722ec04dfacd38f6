"""`Rule`: a code, texts, examples, and the function that yields the rule's hits in a script."""

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
    """A syntax node that a rule reports; `message` and `harm` are set if they differ from the rule's."""

    node: ast.expr | ast.stmt
    message: str | None = None
    edits: tuple[Edit, ...] = ()
    harm: Harm | None = None


Finder = Callable[[Script], Iterator[Violation]]


@dataclass(frozen=True)
class Rule:
    """A rule of `lockstep check`: texts for messages and the manual, and the function that finds hits.

    Attributes:
        code: its first digit is its family's number.
        name: in words, for the manual's headings.
        message: one line beside the found code.
        bad: code that the rule finds; `good` is correct code.
        fix: the effect of `--fix` in words, or empty.
        default: whether it runs if it is not selected by its code.
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
    """Decorator that registers a function as the finder of a new rule; the arguments are those of `Rule`.

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
