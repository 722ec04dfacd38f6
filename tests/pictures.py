"""The pictures of the README: a real terminal, and a chart of a real measurement.

`python -m tests.pictures` writes both, in about five minutes; `kill` or `scaling` after it writes one. It
needs tmux and chromium, and a machine without other work.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from urllib.parse import unquote

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

from tests.browser import browser
from tests.ports import ROOT
from tests.terminal import Terminal

IMAGES = ROOT / "docs/manual/images"
BIN = Path(sys.executable).parent
RUN = "lockstep run -n 2 examples/digits.py --epochs 4"
BENCH = "examples/voc.py --ranks 1,2 --repeat 3 --no-restart --threads 1"
SCRIPT = "--backbone mobilenet_v3_large --crop 129 --epochs 1"
_COLUMNS = 128
_SECONDS = 120.0
#: rich's own form asks a server for its font.
_FORM = re.sub(r"@font-face \{\{.*?\}\}\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
#: The first chart of the page, on white: readers have light and dark backgrounds.
_CHART = """
(() => {
  const chart = document.querySelector(".chart");
  const axis = { gridcolor: "#dcdfe4", linecolor: "#1c2024", automargin: true };
  const font = { family: "sans-serif", size: 13, color: "#1c2024" };
  const template = { layout: { font, xaxis: axis, yaxis: axis,
    paper_bgcolor: "white", plot_bgcolor: "white", margin: { l: 60, r: 20, t: 40, b: 50 },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" } } };
  const figure = { data: chart.data, layout: { ...chart.layout, template } };
  return Plotly.toImage(figure, { format: "svg", width: 560, height: 340 });
})()
"""


def kill(directory: Path) -> str:
    """Run a training twice on a terminal, kill rank 1 of the second, and return the terminal as SVG."""
    (directory / "examples").symlink_to(ROOT / "examples")
    terminal = Terminal(directory, columns=_COLUMNS, lines=60)
    try:
        terminal.type(f"PATH={BIN}:$PATH; PS1='$ '; clear")
        terminal.until(r"\A\s*\$\s*\Z")
        terminal.type(RUN)
        terminal.until(r"(?s)digest=.*\$\s*\Z", _SECONDS)
        terminal.type(RUN)
        terminal.until(r"(?s)digest=.*test accuracy.*test accuracy", _SECONDS)
        os.kill(_rank_one(directory), signal.SIGKILL)
        terminal.until(r"(?s)digest=.*digest=.*\$\s*\Z", _SECONDS)
        text = terminal.coloured
    finally:
        terminal.close()
    console = Console(record=True, width=_COLUMNS, file=io.StringIO())
    console.print(Text.from_ansi(text.rstrip()))
    return console.export_svg(title="", code_format=_FORM, unique_id="kill")


def _rank_one(directory: Path) -> int:
    """Return the process of rank 1 of the newest run."""
    newest = max(directory.glob("runs/digits/*/events/rank-1.jsonl"), key=os.path.getmtime)
    return int(json.loads(newest.read_text().splitlines()[0])["pid"])


def scaling(directory: Path) -> str:
    """Measure a training on one and two ranks, and return the chart of speed-up as SVG."""
    data, page = str(directory / "data"), directory / "page.html"
    drawn = [sys.executable, ROOT / "examples/data.py", "voc", data, "--images", "96"]
    subprocess.run(drawn, check=True)
    measured = f"bench {BENCH} --html {page} -- --data {data} {SCRIPT}"
    subprocess.run([BIN / "lockstep", *measured.split()], check=True, cwd=ROOT)
    with browser(directory / "profile") as opened:
        opened.open(page)
        image = str(opened.ask(_CHART))
    return unquote(image.partition(",")[2])


if __name__ == "__main__":
    for name in sys.argv[1:] or ["kill", "scaling"]:
        with tempfile.TemporaryDirectory() as place:
            (IMAGES / f"{name}.svg").write_text(
                {"kill": kill, "scaling": scaling}[name](Path(place))
            )
