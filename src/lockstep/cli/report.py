"""`lockstep report`: write the records of runs to one HTML page."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.cli.parser import Parser

HELP = "write what runs recorded to one HTML page"
USAGE = "[options] RUN_DIR [RUN_DIR ...]"
EPILOG = """\
The page shows losses and metrics, speed, memory and utilisation of each rank, starts, failures, restarts
and checkpoints, identity and digest; several runs beside each other. It is one file, which loads nothing
from elsewhere. A run that is still training is shown as far as it is. Exit codes: 0 written, 1 a record
cannot be read or the file not be written, 2 usage.
"""
EXAMPLES = {
    "lockstep report runs/train/20261122-103512": "one run, to report.html in its directory",
    "lockstep report runs/train/* -o all.html": "several runs beside each other",
}


def add_flags(parser: Parser) -> None:
    """Add the flags of `lockstep report` to its parser."""
    add = parser.add_argument
    add("run_dirs", type=Path, nargs="+", metavar="RUN_DIR", help="the directories of the runs")
    add(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="page to write, overwritten if it exists (default: report.html in the first RUN_DIR)",
    )


def handle(options: argparse.Namespace) -> int:
    """Write the HTML page about the given runs; return the exit code."""
    from lockstep.tools.report import page
    from lockstep.tools.report.runs import read
    from lockstep.tools.report.sections import sections, title

    page.graph_objects()  # raises an error if plotly is missing, before records are read
    runs = read(options.run_dirs)
    path = options.output or options.run_dirs[0] / "report.html"
    page.write(path, title(runs), sections(runs))
    print(f"{path}: {', '.join(f'{run.label} ({run.status})' for run in runs)}")
    return 0
