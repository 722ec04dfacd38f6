"""`lockstep diff`: compare two runs, and find where the first bits that differ come from."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli.parser import Parser
from lockstep.cli.several_launches import kept_directory
from lockstep.errors import listed

if TYPE_CHECKING:
    from lockstep.tools.replay.diff import Diff

HELP = "find the first step, module and sample in which two runs differ"
USAGE = "[options] RUN_DIR RUN_DIR"
EPILOG = """\
The runs are called A and B. Compared are identity, settings, source files, environment and data, and of
each step the losses of all replicas and the hashes of gradients and parameters that both recorded. The
first step that differs is computed again for both, on one process, with the script of the recorded commit
if files have changed since. Both runs are only read. Exit codes: 0 the same bits, 2 usage, 3 not the same.
"""
EXAMPLES = {
    "lockstep diff runs/train/20261122-103512 runs/train/20261123-091500": "two runs of a script",
}
#: Number of names in a line.
_NAMES = 4


def add_flags(parser: Parser) -> None:
    """Add the flags of `lockstep diff` to its parser."""
    add = parser.add_argument
    add("run_dirs", type=Path, nargs=2, metavar="RUN_DIR", help="the directory of a run")
    add("--keep-runs", type=Path, metavar="DIR", help="keep the run directories of replays in DIR")
    add("--json", action="store_true", help="print the result as JSON")


def handle(options: argparse.Namespace) -> int:
    """Compare the two runs and print the first difference.

    Returns the exit code, 3 if the runs differ.
    """
    from lockstep.tools.replay.diff import diff

    with kept_directory(options.keep_runs, "diff") as directory:
        result = diff(options.run_dirs, directory.absolute())
    same = result.difference is None
    if options.json:
        print(json.dumps({"same": same, **asdict(result)}))
    else:
        _show(result)
        print(f"same: {'yes' if same else 'no'} ({result.compared} values compared)")
    return 0 if same else 3


def _show(result: Diff) -> None:
    for note in result.notes:
        print(f"lockstep: note: {note}", file=sys.stderr)
    for line in result.unlike:
        print(line)
    if result.difference is not None:
        print(f"first difference: {result.difference}")
    if result.step is None:
        return
    places = [f"step {result.step}"]
    if result.parameters:
        places.append(f"before it {listed(result.parameters, _NAMES)}")
    if (call := result.module) is not None:
        name = f"{call['name'] or 'the model'} ({call['class']}) of replica {call['replica']}"
        how = "same input, other output" if call["same_input"] else "other input"
        places.append(f"first module {name}: {how}")
        if call["sample"] is not None:
            places.append(f"first sample {call['sample']}")
    print(f"replayed: {', '.join(places)}{', the same outputs of modules' * (call is None)}")
