"""`lockstep export`: write the weights of a checkpoint to a plain file."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from lockstep.cli.parser import Parser
from lockstep.errors import UsageError

HELP = "write the weights of a run to a plain file"
USAGE = "[options] RUN_DIR"
EPILOG = """\
The file is a state_dict, for torch.load or safetensors, without `module.` before the names. Exit codes:
0 written, 1 the checkpoint cannot be read or the file not be written, 2 usage.
"""
EXAMPLES = {
    "lockstep export runs/train/20261122-103512 -o model.safetensors": "the newest checkpoint",
    "lockstep export runs/train/20261122-103512 --best": "the best one, to model.pt in the run directory",
}


def add_flags(parser: Parser) -> None:
    """Add the flags of `lockstep export` to its parser."""
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN_DIR", help="the directory of the run")
    add(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="file to write: .pt, .pth, .bin or .safetensors (default: RUN_DIR/model.pt)",
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step", type=int, metavar="N", help="the checkpoint of step N (default: the newest)"
    )
    which.add_argument(
        "--best", action="store_true", help="the best checkpoint, by run.save(best=...)"
    )
    add(
        "--model",
        type=int,
        metavar="K",
        help="index of the model, in the order of the run.model calls",
    )
    add("--force", action="store_true", help="overwrite FILE")


def handle(options: argparse.Namespace) -> int:
    """Write the model's weights in a checkpoint of the run to a file; return the exit code."""
    if not options.run_dir.is_dir():
        raise UsageError(f"there is no directory {options.run_dir}; expected that of a run")
    from lockstep.state.checkpoint.export import export, steps_of

    file, checkpoint = export(
        options.run_dir,
        options.output,
        step=options.step,
        best=options.best,
        model=options.model,
        force=options.force,
    )
    print(f"{file}: step {checkpoint.manifest.step}")
    steps = steps_of(options.run_dir)
    if not options.best and options.step is None and steps > checkpoint.manifest.step:
        print(
            f"lockstep: warning: the run has made {steps} steps, and this is its newest checkpoint; hint: "
            "run.save() after the loop keeps the last state",
            file=sys.stderr,
        )
    return 0
