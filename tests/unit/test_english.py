"""All text that users read: phrases that are not used, and a README that fits one look."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from lockstep.settings import TABLE
from tests.errors_page import messages
from tests.ports import ROOT

#: What is not written, and what is written in its place.
PHRASES = {
    r"\b(nobody|somebody|everybody|whoever)\b": "the component: rank, launcher, process",
    r"\bwhom\b": "that, which",
    r"\b(he|she|his|him)\b": "it, the process, the user",
    r"\bboth of (it|them)\b": "the noun",
    r"\bwhich is said\b": "a line says so",
    r"(^|\. |\| )Who (does|is|has|can|may|types|wants|waits|knows)\b": "the noun",
    r"\b(call the roll|roll call)\b": "check in at rendezvous",
    r"\b(gradients|ranks|launchers|replicas)( that| to)? meet\b": "are summed; rendezvous; synchronize",
    r"\b(run|script|launch|training|node|rank)s? (that )?go(es)? on\b": "continues, resumes",
    r"\bhow a run gets on\b": "the progress of a run",
    r"\bknows nothing of\b": "does not import, does not use",
    r"\b(is|are) parted with\b": "is closed",
}
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/manual").glob("*.md")),
]


def _texts() -> Iterator[tuple[str, str]]:
    """Yield what users read, each with a name: pages without their code, messages, help."""
    for page in PAGES:
        yield page.name, re.sub(r"(?ms)^```.*?^```$|`[^`\n]+`", "…", page.read_text())
    for kind, told in messages().items():
        yield from ((kind, f"{message} {hint}") for message, hint in told.items())
    for name, setting in TABLE.items():
        yield name, setting.help


TEXTS = list(_texts())


@pytest.mark.parametrize("phrase", PHRASES)
def test_phrases_that_are_not_used(phrase: str) -> None:
    found = [
        f"{name}: {text[max(0, one.start() - 40) : one.end() + 20]!r}"
        for name, text in TEXTS
        for one in re.finditer(phrase, text, re.IGNORECASE)
    ]
    assert not found, f"say {PHRASES[phrase]}:\n" + "\n".join(found)


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
