"""Python code blocks in the README and the manual, and the scripts that they are run as.

A comment before a block says how it is run. Its first line is one of

- `<!-- not run: REASON -->`, with a reason of `REASONS`;
- `<!-- continues PAGE -->`: inside the run of the first block of that page, in place of its loop;
- `<!-- continues -->`: after the block above it, in one script;
- `<!-- begins with`: after the code of the comment, and inside of it if that ends with a `with` statement;
- `<!-- fails with TEXT -->`, `<!-- run with COMMAND -->`.

Further lines of the comment are code that stands before the block. A block without a comment is run as it
is. A page may say of all its blocks: `<!-- python blocks not run: REASON -->`.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tests.console import PAGES
from tests.ports import ROOT

#: Why the blocks of a page, or one block, are not run here, and nothing else.
REASONS = (
    "examples of rules, which the tests of the rules check",
    "needs a GPU",
    "needs MPI",
    "needs Ray",
    "recipes, which tests/adversary/test_recipes.py verifies",
    "the model, arguments and data of the reader",
    "a part of a class or a function",
)
_BLOCK = re.compile(
    r"(?ms)^( *)(?:<!-- ((?:(?!-->).)*?)\s*-->\n\1)?```python\n(.*?)^\1```$",
)
_OF_PAGE = re.compile(r"(?m)^<!-- python blocks not run: (.*) -->$")


@dataclass(frozen=True)
class Block:
    """One code block: its page, its line there, the note before it, code of the note, and its code."""

    page: Path
    line: int
    note: str
    before: str
    code: str


@dataclass(frozen=True)
class Script:
    """What is run for a block and those that continue it.

    Attributes:
        name: the page, and the first lines of the blocks.
        text: the code.
        indent: what stands before lines of blocks that continue it.
        command: by what it is run.
        error: what it fails with.
        reason: why it is not run.
    """

    name: str
    text: str
    indent: str = ""
    command: str = "lockstep run -n 2"
    error: str = ""
    reason: str = ""


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page."""
    text = page.read_text()
    for found in _BLOCK.finditer(text):
        note, _, before = (found[2] or "").partition("\n")
        line = text.count("\n", 0, found.start(3))
        yield Block(page, line, note.strip(), textwrap.dedent(before), textwrap.dedent(found[3]))


def scripts() -> Iterator[Script]:
    """Yield the scripts of all pages."""
    for page in PAGES:
        of_page = _OF_PAGE.search(page.read_text())
        if of_page is not None:
            yield Script(page.name, "", reason=of_page[1])
            continue
        script = None
        for block in blocks(page):
            if block.note == "continues":
                assert script is not None, f"{page}:{block.line} continues nothing"
                script = replace(script, name=f"{script.name},{block.line}")
            elif script is not None:
                yield script
                script = None
            script = _begin(block) if script is None else script
            code = block.code if block.note[:6] == "begins" else f"{block.before}\n{block.code}"
            script = replace(script, text=f"{script.text}\n{textwrap.indent(code, script.indent)}")
        if script is not None:
            yield script


def _begin(block: Block) -> Script:
    """Return the script that a block begins, without the block."""
    word, _, rest = block.note.partition(" ")
    script = Script(f"{block.page.name}:{block.line}", "")
    match word:
        case "continues":
            first = next(blocks(block.page.with_name(f"{rest}.md"))).code
            text = re.split(r"(?m)^ +for epoch", first)[0]
            return replace(script, text=text, indent="    ")
        case "begins":
            last = re.findall(r"(?m)^\S.*", block.before)[-1]
            indent = "    " if last.startswith("with ") else ""
            return replace(script, text=block.before, indent=indent)
        case "fails":
            return replace(script, error=rest.removeprefix("with "))
        case "run":
            return replace(script, command=rest.removeprefix("with "))
        case "not":
            return replace(script, reason=rest.removeprefix("run: "))
    assert not word, f"{block.page}:{block.line}: {block.note}"
    return script


def named(page: str) -> list[str]:
    """Return the code of a page's blocks in the manual."""
    return [block.code for block in blocks(ROOT / "docs/manual" / page)]
