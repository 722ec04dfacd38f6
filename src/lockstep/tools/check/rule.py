"""`Rule`: a code, its texts, examples, and the function that yields its findings."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from lockstep.tools.check.fix import Edit
from lockstep.tools.check.script import Script

#: What comes of it: ranks wait for ever, weights or files are wrong, time is lost, numbers mislead.
Harm = Literal["hangs", "corrupts", "fails", "misleads", "slow"]
#: Codes of files that cannot be read as Python, and of comments that name no rule.
SYNTAX, UNKNOWN = "LS001", "LS002"


@dataclass(frozen=True)
class Hit:
    """A place that a rule has found; message and harm, where they are not the rule's own."""

    node: ast.expr | ast.stmt
    message: str | None = None
    edits: tuple[Edit, ...] = ()
    harm: Harm | None = None


Finder = Callable[[Script], Iterator[Hit]]


@dataclass(frozen=True)
class Rule:
    """A rule; its page in the manual is written from its text.

    Attributes:
        code: by its first digit one of a family.
        name: in words, for the manual's headings.
        message: one line beside the place.
        bad: code that the rule finds; `good` is to be used instead.
        fix: what `--fix` does, or nothing.
        default: whether it runs where it is not selected by its code.
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
    """Enter a function among the rules; the arguments are those of `Rule`.

    `example` is a diff: lines with `-` are in the bad code alone, lines with `+` in the good code alone.
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
