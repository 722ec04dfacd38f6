"""All text that users read: phrases that are not used, and a README that fits one look."""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator

import pytest

from lockstep import cli
from lockstep.settings import TABLE
from tests.errors_page import messages
from tests.ports import ROOT

#: Where a sentence, a point of a list or a cell of a table begins.
_BEGINS = r"(?:(?<=[.:;|] )|(?<=\*\* )|(?:\A|(?<=\n))(?:- )?)"
#: What is not written, and what is written in its place.
PHRASES = {
    r"\b(nobody|somebody|everybody|whoever|anyone|someone|everyone)\b": "the component: rank, process",
    r"\bwhom\b": "that, which",
    r"\b(he|she|his|him)\b": "it, the process, the user",
    r"\bboth of (it|them)\b": "the noun",
    r"\bwhich is said\b": "a line says so",
    rf"{_BEGINS}(?-i:Wh(o|at|atever|ichever)) (?!happened|it costs)[^.?!|\n]*([.!|\n]|\Z)": "the noun",
    r"\b(call the roll|roll call)\b": "check in at rendezvous",
    r"\b(gradients?|ranks?|nodes?|launchers?|replicas?)( that| to| did not)? meets?\b": (
        "are summed; rendezvous; synchronize"
    ),
    r"\b(goes|go|went|going) on\b": "continues, resumes",
    r"\bgets? on\b": "the progress of a run",
    r"\bknows? nothing\b": "does not import, does not use",
    r"\b(is|are) parted with\b": "is closed",
}
#: The same for text without a sentence before it: messages, help and docstrings.
ALONE = {
    r"\A(?-i:It|They|Them|That|Those|These|This)\b": "the noun",
    r"\b(all|each|some|none|any|most|neither|either) of (it|them|these|those)\b": "the noun",
}
#: Modules whose docstrings are the reference of the API, from `docs/manual/api.md`.
API = [
    ROOT / "src/lockstep" / name
    for name in (
        *("errors.py", "engine/data/loader.py", "launch/api.py", "testing/ranks.py"),
        *("run.py", "engine/training/run_metrics.py", "engine/training/run_properties.py"),
        *("world/environments/__init__.py", "world/model.py"),
    )
]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/manual").glob("*.md")),
]


def test_code_blocks_name_their_language() -> None:
    for page in (*PAGES, *(ROOT / "docs").rglob("*.md")):
        fences = re.findall(r"(?m)^ *```+(.*)$", page.read_text())
        assert "" not in fences[::2], f"{page}: write ```text where it is no code"


def _without_code(text: str) -> str:
    return re.sub(r"(?ms)^```.*?^```$|`[^`\n]+`", "…", text)


def _messages() -> Iterator[tuple[str, str]]:
    """Yield messages and hints, help and docstrings, each with a name."""
    for kind, told in messages().items():
        for pair in told.items():
            yield from ((kind, text) for text in pair)
    for name, setting in TABLE.items():
        yield name, setting.help
    whole = cli.whole_parser()
    for parser in (whole, *whole.verbs.values()):
        groups = [group.description for group in parser._action_groups]
        flags = [action.help for action in parser._actions if action.help != argparse.SUPPRESS]
        texts = (parser.description, parser.epilog, *parser.examples.values(), *groups, *flags)
        yield from ((f"{parser.prog} --help", text) for text in texts if text)
    for file in API:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield file.name, _without_code(ast.get_docstring(node) or "")


PAGES_READ = [(page.name, _without_code(page.read_text())) for page in PAGES]
MESSAGES = list(_messages())


@pytest.mark.parametrize("phrase", [*PHRASES, *ALONE])
def test_phrases_that_are_not_used(phrase: str) -> None:
    found = [
        f"{name}: {text[max(0, one.start() - 40) : one.end() + 20]!r}"
        for name, text in (*MESSAGES, *PAGES_READ * (phrase in PHRASES))
        for one in re.finditer(phrase, text, re.IGNORECASE)
    ]
    assert not found, f"say {(PHRASES | ALONE)[phrase]}:\n" + "\n".join(found)


def test_the_readme_fits_one_look() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert any("GPU" in line for line in lines[:12]), (
        "what has run on GPUs belongs to the first screen"
    )


def test_figures_of_the_readme_are_those_of_the_benchmarks() -> None:
    table = re.findall(r"(?m)^\| .*$", (ROOT / "README.md").read_text())
    figures = {one for row in table[2:] for one in re.findall(r"\d+\.\d+|\d+ %", row)}
    measured = (ROOT / "docs/manual/benchmarks.md").read_text()
    assert len(figures) > 10
    assert not [one for one in figures if one.removesuffix(" %") not in measured]
