"""`lockstep doctor`: examine machines and their network before training."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from lockstep.cli import nodes
from lockstep.cli.parser import Parser
from lockstep.errors import UsageError
from lockstep.settings import TABLE

HELP = "find what is wrong with machines and the network between them"
USAGE = "[options]"
EPILOG = """\
Under Slurm, `srun -N 2 lockstep doctor` examines two nodes and the network between them. Each line is
ok, a warning or a failure, and says what to do. Nothing is changed. Exit codes: 0 no failure, 1 a failure,
2 usage, 3 a node did not arrive.
"""
EXAMPLES = {
    "lockstep doctor": "examine this machine",
    "lockstep doctor --nnodes 2 --rdzv-endpoint node0": "on each of two nodes: examine both",
}


def add_flags(parser: Parser) -> None:
    """Add the flags of `lockstep doctor` to its parser."""
    add = parser.add_argument
    nodes.add(parser, elastic=False)
    add(
        "--run-dir",
        type=Path,
        default=Path("runs"),
        metavar="DIR",
        help="directory of the runs, whose file system is checked (default: runs)",
    )
    add("--json", action="store_true", help="print the report as JSON")


def handle(options: argparse.Namespace) -> int:
    """Examine this machine, or several nodes together; return the exit code."""
    import os

    # torch reads this at its import; it would print stacks of lost connections before the report.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")

    from lockstep.launch.nodes.config import Nodes, rendezvous_config
    from lockstep.tools.doctor.check import Options
    from lockstep.tools.doctor.examine import examine

    TABLE["run_dir"].require(options.run_dir, "--run-dir")
    given: dict[str, Any] = nodes.given(options)
    several = Nodes(**given)
    if several.least is not None:
        raise UsageError(
            f"--nnodes is {options.nnodes}; expected a number: all nodes are looked at"
        )
    config = rendezvous_config(several, ("lockstep doctor",), os.environ)
    address = None if config is None else config.address
    report = examine(Options(run_dir=options.run_dir, address=address), config, several)
    if report.speaks:
        print(json.dumps(report.as_json()) if options.json else "\n".join(report.lines))
    return report.exit_code
