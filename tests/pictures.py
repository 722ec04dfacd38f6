"""The picture of the README: `lockstep verify` on a real terminal.

`python -m tests.pictures` writes it, in about a minute. It needs tmux.
"""

from __future__ import annotations

import io
import re
import sys
import tempfile
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from tests.ports import ROOT
from tests.terminal import Terminal

PICTURE = ROOT / "docs/manual/images/verify.svg"
BIN = Path(sys.executable).parent
COMMAND = "lockstep verify examples/digits.py --layouts 1 2 2,kill@99"
#: As many as can be read on a telephone.
_COLUMNS = 66
_SECONDS = 600.0
#: rich's own form asks a server for its font.
_FORM = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)


def verify(directory: Path) -> str:
    """Run a training on three layouts on a terminal, and return the terminal as SVG."""
    (directory / "examples").symlink_to(ROOT / "examples")
    terminal = Terminal(directory, columns=_COLUMNS, lines=40)
    try:
        terminal.type(f"PATH={BIN}:$PATH; PS1='$ '; clear")
        terminal.until(r"\A\s*\$\s*\Z")
        terminal.type(COMMAND)
        terminal.until(r"(?s)same: .*\$\s*\Z", _SECONDS)
        text = terminal.coloured
    finally:
        terminal.close()
    console = Console(record=True, width=_COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(text.rstrip().removesuffix("$").rstrip()))
    return console.export_svg(title="", code_format=_FORM, unique_id="verify")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        PICTURE.write_text(verify(Path(place)))
