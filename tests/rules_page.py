"""The rules of `lockstep check`: a section of the manual's page, from the rules' own text.

`python -m tests.rules_page` writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from lockstep.tools.check.rules import RULES, Rule
from tests.ports import ROOT

PAGE = ROOT / "docs/manual/check.md"
#: In the page, the section stands between these two lines.
_PLACE = re.compile(r"(?<=<!-- all rules -->\n).*?(?=<!-- end -->)", re.DOTALL)


def written(page: str) -> str:
    """Return the page with the rules of now."""
    return _PLACE.sub(lambda _: "\n".join(_section()), page)


def _section() -> Iterator[str]:
    yield "| rule | finds | comes of it | fix |"
    yield "| --- | --- | --- | --- |"
    for rule in RULES.values():
        words = re.sub(r"[^a-z0-9_ -]", "", rule.name.lower()).replace(" ", "-")
        link = f"[{rule.code}](#{rule.code.lower()}-{words})"
        selected = "" if rule.default else " (if selected)"
        yield f"| {link} | {rule.name}{selected} | {rule.harm} | {'yes' if rule.fix else ''} |"
    yield ""
    for rule in RULES.values():
        yield from _told(rule)


def _told(rule: Rule) -> Iterator[str]:
    yield f"### {rule.code}: {rule.name}\n"
    yield f"*{rule.message[0].upper()}{rule.message[1:]}.*\n"
    yield f"{rule.why}\n"
    if rule.fix:
        yield f"`--fix` {rule.fix}.\n"
    if not rule.default:
        yield "Runs if it is selected.\n"
    yield f"```python\n{rule.bad}```\n"
    yield f"Use instead:\n\n```python\n{rule.good}```\n"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
