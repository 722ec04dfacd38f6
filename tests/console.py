"""Console sessions in the README and the manual: what they type, what they show, and whether that is run.

A comment before a block says how it is run: `<!-- not run: REASON -->`, `<!-- wide -->` (in the long run of
all tests only), `<!-- run with FILE -->` (FILE is its train.py) or `<!-- wide, run with FILE -->`. A block
without a comment is run as it stands, in a directory that has `examples/`.
"""

from __future__ import annotations

import itertools
import re
import shlex
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.ports import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs/manual").glob("*.md")),
]
#: Why a block is not run, and nothing else.
REASONS = (
    "depends on the machine",
    "installs packages",
    "names a script of the reader",
    "needs a container",
    "needs Kubernetes",
    "needs a GPU",
    "needs a second terminal",
    "needs MPI",
    "needs Ray",
    "needs several nodes",
    "needs Slurm",
    "needs the records of a run",
    "runs for minutes",
)
_BLOCK = re.compile(r"(?ms)^(?:<!-- ([^\n]*) -->\n)?```console\n(.*?)^```$")
_SAVED = re.compile(r"(?ms)^Save this as `([\w.]+)`:\n\n```python\n(.*?)^```$")
_FENCED = re.compile(r"(?ms)^```(console|sh)\n(.*?)^```$")
#: A command, after a prompt or in a shell script; not one that the page shows to be refused.
_COMMAND = re.compile(r"(?m)^(.*?)(\blockstep [a-z]+( [^|\n]*)?)$(?!\nlockstep: error: lockstep)")
#: What is not compared, and what stands for it.
_MASKS = (
    (re.compile(r"[─━┏┳┓┡╇┩└┴┘│┃]+"), " "),
    (re.compile(r"\d{8}-\d{6}"), "TIME"),
    (re.compile(r"rank \d+ of|rank-\d+(?=\.log)"), "rank K of"),  # the first that failed
    (re.compile(r"/\S*/bin/python[\d.]*"), "PYTHON"),
    (re.compile(r"/\S*/(?=runs/)"), "DIR/"),
    (re.compile(r"(?<![\w.])(/\w[\w.-]*){2,}"), "DIR"),
    (re.compile(rf"\bon ({re.escape(socket.gethostname())}|vm)\b"), "on HOST"),
    (re.compile(r"-?\d+([.,]\d+)+|\d{3,}|\d+(?= (ms|s|[KMG]iB|[MG]bit/s)\b)"), "N"),
)
_DIGEST = re.compile(r"\b(?=[a-f]*\d)([0-9a-f]{8})(?:[0-9a-f]{56}|[0-9a-f]{8}|…)")


@dataclass(frozen=True)
class Block:
    """One console session.

    Attributes:
        page: the page that it is in.
        line: the number of its first line.
        note: the comment before it.
        steps: commands, each with the lines that it prints.
        files: files that the page has the reader save, by name.
    """

    page: str
    line: int
    note: str
    steps: tuple[tuple[str, str], ...]
    files: tuple[tuple[str, str], ...]

    @property
    def refused(self) -> str | None:
        """Why it is not run."""
        return self.note.partition("not run: ")[2] or None

    @property
    def script(self) -> Path | None:
        """The file that is its train.py."""
        name = self.note.partition("run with ")[2]
        return ROOT / name if name else None


def blocks() -> Iterator[Block]:
    """Yield the console sessions of all pages."""
    for page in PAGES:
        text = page.read_text()
        files = tuple((one[1], one[2]) for one in _SAVED.finditer(text))
        for found in _BLOCK.finditer(text):
            line = text.count("\n", 0, found.start()) + 1
            yield Block(page.name, line, found[1] or "", tuple(_steps(found[2])), files)


def _steps(body: str) -> Iterator[tuple[str, str]]:
    for part in re.split(r"(?m)^\$ ", body)[1:]:
        command = re.match(r"(?:.*\\\n)*.*\n", part)
        assert command is not None
        yield command[0].rstrip(), part[command.end() :]


def flags_of_spans() -> Iterator[tuple[str, str, str]]:
    """Yield page, verb and flag for each flag of a verb that a sentence or a table names."""
    for page in PAGES:
        for span in re.findall(r"`lockstep ([^`\n]+)`", page.read_text()):
            verb, *words = span.split()
            ours = itertools.takewhile(lambda one: not one.endswith(".py") and one != "--", words)
            yield from ((page.name, verb, one.partition("=")[0]) for one in ours if one[0] == "-")


def commands() -> Iterator[tuple[str, str]]:
    """Yield each `lockstep` command of the fenced blocks of all pages, with its page."""
    for page in PAGES:
        text = page.read_text()
        for kind, body in _FENCED.findall(text):
            for before, found, _ in _COMMAND.findall(re.sub(r"\\\n\s*", "", body)):
                if kind == "sh" or "$ " in before:
                    yield page.name, shlex.join(shlex.split(found, comments=True))


def matches(shown: str, printed: str) -> bool:
    """Return whether a command printed what a page shows; `…` stands for anything."""
    wanted, got = _masked(shown), _masked(printed)
    pattern = "".join(
        r"(?:.*\n)*?" if line == "…" else ".*".join(map(re.escape, line.split("…"))) + r"\n"
        for line in wanted
    )
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in got)) is not None


def _masked(text: str) -> list[str]:
    """Return the lines, without what no two runs have in common; equal digests stay equal."""
    seen: dict[str, str] = {}
    text = _DIGEST.sub(lambda one: seen.setdefault(one[1], f"DIGEST{chr(65 + len(seen))}"), text)
    for pattern, name in _MASKS:
        text = pattern.sub(name, text)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    lines = [line for line in lines if line]
    tagged = [line for line in lines if line.startswith("[rank ")]  # in whatever order they came
    return sorted(tagged) if tagged == lines else lines
