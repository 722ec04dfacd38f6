"""The Chinese pages in docs/zh, and the English pages that they translate.

`python -m tests.zh` names the pages whose English has changed. `python -m tests.zh PAGE …` (`manual/data`,
or `all`) is for after their translation: it copies the English code blocks into them, and notes the hash of
the English text.
"""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

from tests.ports import ROOT

DOCS = ROOT / "docs"
#: The parts of the manual that are translated. Of the reference there are outlines.
PARTS = ("get-started", "guides", "concepts")
_HEAD = re.compile(r"\A---\ntranslation_of: (\w*)\n---\n\n?")
_BLOCK = re.compile(r"(?ms)^ *(`{3,})(.*?)^ *\1$")
_COMMENT = re.compile(r"(?ms)^ *<!-- (?:(?!-->).)*-->\n")
_TOCTREE = "{toctree}"
#: Blocks that only the site has: lists of contents, and cards.
_SITE = (_TOCTREE, "{container}")
_SCALE = {"": 1.0, " 万": 1e4, " 亿": 1e8, " million": 1e6}
#: Words that a translation may write as a number.
_NUMBERS = {
    "half": 0.5,
    "unit": 1,
    "once": 1,
    "first": 1,
    "single": 1,
    "twice": 2,
    "both": 2,
    "second": 2,
} | dict(
    zip(["zero", "one", "two", "three", "four", "five", "six", "seven"], range(8), strict=True)
)


def names() -> list[str]:
    """Return the pages that are translated: the home page, the parts, and what these list."""
    return ["index", *PARTS, "reference", *(page for part in PARTS for page in _listed(part))]


def outlines() -> list[str]:
    """Return the pages of the reference: in Chinese each has a line for each part of the English one."""
    return _listed("reference")


def _listed(part: str) -> list[str]:
    return [
        line
        for found in _BLOCK.finditer(english(part))
        for line in found[2].splitlines()[1:]
        if found[2].startswith(_TOCTREE) and line and not line.startswith(":")
    ]


def english(name: str) -> str:
    """Return the text of an English page. That of the home page is the README."""
    return (ROOT / "README.md" if name == "index" else DOCS / f"{name}.md").read_text()


def page(name: str) -> Path:
    """Return the file of a Chinese page."""
    return DOCS / "zh" / f"{name}.md"


def fingerprint(text: str) -> str:
    """Return a hash of an English page without comments and code blocks: those are compared."""
    return hashlib.sha256(_COMMENT.sub("", _BLOCK.sub("", text)).encode()).hexdigest()[:16]


def stale(name: str) -> bool:
    """Return whether the English page has changed since its translation."""
    found = _HEAD.match(page(name).read_text())
    return found is None or found[1] != fingerprint(english(name))


def blocks(text: str) -> list[str]:
    """Return the code blocks of a page."""
    return [found[0] for found in _BLOCK.finditer(text) if not found[2].startswith(_SITE)]


def prose(text: str) -> str:
    """Return a page without its code blocks, comments and front matter."""
    return _COMMENT.sub("", _BLOCK.sub("", _HEAD.sub("", text)))


def sections(text: str) -> list[tuple[str, str]]:
    """Return the heading and the prose of each section of a page; the first section has no heading."""
    parts = re.split(r"(?m)^#+ (.*)$", prose(text))
    return list(zip(["", *parts[1::2]], parts[::2], strict=True))


def differences(english: str, chinese: str) -> list[str]:
    """Return the code, links and numbers that only one of a section and its translation has."""
    words = {_NUMBERS[word] for word in re.findall("[a-z]+", english.lower()) if word in _NUMBERS}
    mine, its = _numbers(english), _numbers(chinese)
    return [
        *sorted(_code(english) ^ _code(chinese)),
        *sorted(_links(english) ^ _links(chinese)),
        *map(str, sorted((mine - its) | (its - mine - words))),
    ]


def _code(text: str) -> set[str]:
    return set(re.findall(r"`[^`\n]+`", re.sub(r"\b\n *", " ", text)))


def _links(text: str) -> set[str]:
    """Return the names of the pages that a text links to: paths and anchors differ by language."""
    pages = {Path(link.split("#")[0]).name for link in re.findall(r"\]\(([^)]+)\)", text)}
    return {"index.md" if name == "README.md" else name for name in pages}


def _numbers(text: str) -> set[float]:
    text = re.sub(r"`[^`]*`", "", re.sub(r"\]\([^)]*\)", "]", text))
    found = re.findall(r"(?<![A-Za-z\d.])(\d[\d,]*(?:\.\d+)?)( million| 万| 亿)?", text)
    return {round(float(number.replace(",", "")) * _SCALE[scale], 6) for number, scale in found}


def noted(text: str, of: str) -> str:
    """Return a Chinese page with the code blocks and the hash of an English one."""
    new = blocks(of)
    if len(new) != len(blocks(text)):
        raise SystemExit(f"{len(blocks(text))} code blocks; the English page has {len(new)}")
    body = _BLOCK.sub(
        lambda found: found[0] if found[2].startswith(_SITE) else new.pop(0), _HEAD.sub("", text)
    )
    return f"---\ntranslation_of: {fingerprint(of)}\n---\n\n{body}"


def main(pages: list[str]) -> None:
    """Print which pages are to be translated anew; or note that these pages are translated."""
    for name in names() if pages == ["all"] else pages:
        page(name).write_text(noted(page(name).read_text(), english(name)))
    for name in names():
        if not page(name).exists() or stale(name):
            sys.stdout.write(f"{name}: the English page has changed since its translation\n")


if __name__ == "__main__":
    main(sys.argv[1:])
