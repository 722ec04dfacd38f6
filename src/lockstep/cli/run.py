"""`lockstep run`: launch a script on any number of ranks of this machine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.launch.spec import LaunchSpec

_EPILOG = """\
Everything after SCRIPT belongs to the script. Flags win over the LOCKSTEP_* variables of the
environment. Exit codes: 0 done, 1 the script failed, 2 usage, 3 a check did not hold.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this verb to the command line."""
    parser = subparsers.add_parser(
        "run",
        help="launch a script on any number of ranks",
        usage="lockstep run [options] SCRIPT [ARG ...]",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    _add_layout(parser)
    _add_start(parser)
    _add_records(parser)
    parser.add_argument("target", metavar="SCRIPT", help="the script to run, or with -m a module")
    parser.add_argument("args", metavar="ARG", nargs=argparse.REMAINDER, help="arguments for it")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    """Launch what `options` say; return the exit code."""
    from lockstep.launch import api

    spec = read(options)
    return api.show_plan(spec) if options.dry_run else api.run(spec)


def read(options: argparse.Namespace) -> LaunchSpec:
    """Return the launch that `options` describe.

    Raises:
        UsageError: if they describe none that could work.
    """
    from lockstep.launch.spec import LaunchSpec, parse_ranks

    return LaunchSpec(
        target=options.target,
        kind="module" if options.module else "script",
        args=tuple(options.args),
        n=parse_ranks(options.n),
        start=options.start,
        devices=options.devices,
        replicas=options.replicas,
        threads=options.threads,
        run_dir=options.run_dir,
        fresh=options.fresh,
        tee=options.tee,
        stop_on_nan=options.stop_on_nan,
        local_rank_option=options.local_rank_option,
    )


def _add_layout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout")
    group.add_argument(
        "-n",
        default="1",
        metavar="N",
        help="ranks: a number, cpu (cores), gpu, or auto (default: 1)",
    )
    group.add_argument("--replicas", type=int, metavar="R", help="replicas of the run, at least N")
    group.add_argument("--devices", choices=("auto", "cpu", "gpu"), help="what ranks compute on")
    group.add_argument("--threads", type=int, metavar="T", help="intra-op threads of each rank")


def _add_start(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("start")
    group.add_argument(
        "--start",
        choices=("fork", "spawn", "exec"),
        default="fork",
        help="fork from a process that has imported torch (default), or a fresh interpreter each, "
        "with (spawn) or without (exec) Lockstep's error reports",
    )
    group.add_argument("-m", dest="module", action="store_true", help="SCRIPT is a module's name")
    group.add_argument(
        "--legacy-local-rank",
        dest="local_rank_option",
        action="store_const",
        const="--local-rank",
        help="give old scripts the option --local-rank=K",
    )
    group.add_argument(
        "--legacy-local_rank",
        dest="local_rank_option",
        action="store_const",
        const="--local_rank",
        help="the same for scripts that spell it --local_rank=K",
    )
    group.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")


def _add_records(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("records")
    group.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="default: runs/NAME/TIME, a new one"
    )
    group.add_argument("--fresh", action="store_true", help="overwrite a finished run in DIR")
    group.add_argument("--tee", action="store_true", help="show all ranks, each line prefixed")
    group.add_argument(
        "--stop-on-nan", action="store_true", help="end at a loss that is not finite"
    )
