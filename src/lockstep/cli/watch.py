"""`lockstep watch`: show the progress of a run, from its records."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.cli.parser import Parser
from lockstep.errors import UsageError

HELP = "show the progress of a run on the terminal"
USAGE = "[options] [RUN_DIR]"
EPILOG = """\
`lockstep watch` reads the run directory and nothing else: the run is not affected. On a terminal it draws
a picture, q or Ctrl-C leaves; elsewhere it prints lines. It ends when the run does.
Exit codes: 0 finished, or left before; 1 the run failed, its processes were killed, or the record cannot
be read; 2 usage; 75 the run was preempted.
"""
EXAMPLES = {
    "lockstep watch": "the newest run in runs/",
    "lockstep watch runs/train/20261122-103512 --rank 1": "another run, with the log of rank 1",
}


def add_flags(parser: Parser) -> None:
    """Add the flags of `lockstep watch` to its parser."""
    add = parser.add_argument
    add(
        "run_dir",
        type=Path,
        nargs="?",
        metavar="RUN_DIR",
        help="the directory of the run (default: the newest run in runs/)",
    )
    add("--rank", type=int, default=0, metavar="K", help="show the log of rank K (default: 0)")
    add(
        "--every",
        type=float,
        metavar="SECONDS",
        help="seconds between updates (default: 1 on a terminal, 5 elsewhere)",
    )


def handle(options: argparse.Namespace) -> int:
    """Show the progress of a run until it ends; return the exit code."""
    if options.every is not None and not 0.05 <= options.every <= 3600:
        raise UsageError(f"--every is {options.every:g}; expected seconds from 0.05 to 3600")
    if options.rank < 0:
        raise UsageError(f"--rank is {options.rank}; expected 0 or more")
    from lockstep.tools.watch.loop import watch
    from lockstep.tools.watch.watcher import Watcher, newest

    directory = options.run_dir or newest(Path("runs"))
    return watch(Watcher(directory, options.rank), options.every)
