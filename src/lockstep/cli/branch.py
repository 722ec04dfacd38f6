"""`lockstep branch`: begin a new run with the state after a step of a recorded run."""

from __future__ import annotations

import argparse
from pathlib import Path

from lockstep.cli import setting_flags
from lockstep.cli.parser import Parser
from lockstep.cli.several_launches import kept_directory
from lockstep.settings import TABLE

HELP = "begin a new run with the state after a step of another run"
USAGE = "--step N [options] RUN_DIR [-- ARG ...]"
EPILOG = """\
The new run has the script, arguments and settings of the recorded run, except those that are given here;
words after -- replace all arguments of the script. A setting of an optimizer, such as the learning rate,
that the new script sets otherwise than the recorded one counts. Without a checkpoint of step N, the steps
up to N are computed again from the newest one before, and have to agree with the record. Exit codes:
those of lockstep run, and 3 if they do not agree.
"""
EXAMPLES = {
    "lockstep branch runs/train/20261122-103512 --step 3000 -- --lr 0.01": "with a different learning rate",
    "lockstep branch runs/train/20261122-103512 --step 3000 -n 4 --precision bf16": "with other settings",
}
#: Settings that a branch chooses itself.
_OWN = ("resume", "fresh", "run_dir")


def add_flags(parser: Parser) -> None:
    """Add the flags of `lockstep branch` to its parser."""
    add = parser.add_argument
    add(
        "--step",
        type=int,
        required=True,
        metavar="N",
        help="the step after which the new run begins",
    )
    add("-n", metavar="N", help="number of ranks (default: 1)")
    add(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="directory of the new run (default: runs/NAME/TIME)",
    )
    for title in dict.fromkeys(one.flag[0] for one in TABLE.values() if one.flag):
        chosen = [
            n for n, one in TABLE.items() if one.flag and one.flag[0] == title and n not in _OWN
        ]
        if title != "torchrun":
            setting_flags.add(parser.add_argument_group(title), *chosen)
    add("target", type=Path, metavar="RUN_DIR", help="the directory of the recorded run")
    parser.takes_script = True


def handle(options: argparse.Namespace) -> int:
    """Start a new run from a state of the recorded run, and wait for its end; return its exit code."""
    from lockstep.launch.flag_settings import FlagSettings
    from lockstep.tools.replay.branch import branch
    from lockstep.tools.replay.recorded import RecordedRun

    names = [name for name in TABLE if name not in _OWN and hasattr(options, name)]
    given = FlagSettings(**setting_flags.given(options, names))
    words = setting_flags.words(options, names)
    if options.n is not None:
        words += ["-n", options.n]
    run = RecordedRun.of(options.target)
    with kept_directory(None, "branch") as scratch:
        return branch(
            run,
            options.step,
            words,
            list(options.script_args) or None,
            given=given,
            run_dir=options.run_dir,
            scratch=scratch,
        )
