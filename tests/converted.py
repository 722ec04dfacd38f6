"""Scripts for `lockstep convert`, what it changes in them, and the example in the manual's page.

`python -m tests.converted` converts them anew, and writes the diffs, and that of the page.
"""

from __future__ import annotations

import difflib
import re
from pathlib import Path

from lockstep.tools.convert.script import ConvertedScript, convert
from tests.ports import ROOT

PAGE = ROOT / "docs/manual/convert.md"
SCRIPTS = ROOT / "tests/unit/tools/convert/scripts"
#: Each script, and how many questions conversion leaves in it.
NAMES = {
    "accumulation": 0,
    "amp": 0,
    "ddp": 0,
    "ddp_trainer": 0,
    "gan": 0,
    "imagenet": 1,
    "pair": 1,
    "straight": 0,
    "trainer": 0,
    "transfer": 3,
}
#: In the page, the example stands between these two lines.
_PLACE = re.compile(r"(?<=<!-- example -->\n).*?(?=<!-- end -->)", re.DOTALL)


def made(name: str) -> ConvertedScript:
    """Return a script, converted now."""
    return convert(SCRIPTS / "plain" / f"{name}.py")


def expected(name: str) -> Path:
    """Return the file with the diff of a script as it was converted before."""
    return SCRIPTS / "diffs" / f"{name}.diff"


def diff(name: str) -> str:
    """Return what conversion changes now, as `diff -w` shows it; lines are shown as they are after it."""
    one = made(name)
    before = one.module.text.splitlines()
    after = one.text.splitlines()
    plain, moved = ([line.strip() for line in lines] for lines in (before, after))
    shown: list[str] = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, plain, moved).get_opcodes():
        if kind == "equal":
            kept = [f" {line}" for line in after[c:d]]
            shown += kept if len(kept) < 5 else [*kept[:1], "@@", *kept[-1:]]
        else:
            shown += [f"-{line}" for line in before[a:b]] + [f"+{line}" for line in after[c:d]]
    return "".join(f"{line.rstrip()}\n" for line in shown)


def written(page: str) -> str:
    """Return the page with the diff of now."""
    return _PLACE.sub(lambda _: f"```diff\n{diff('straight')}```\n", page)


if __name__ == "__main__":
    for each in NAMES:
        expected(each).write_text(diff(each))
    PAGE.write_text(written(PAGE.read_text()))
