"""`lockstep run`: launch a script on any number of ranks and nodes."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli import method, torchrun
from lockstep.cli.parser import Parser

if TYPE_CHECKING:
    from lockstep.launch.spec import LaunchSpec
    from lockstep.launch.streams import Bits, Streams
    from lockstep.launch.survival import Survival
    from lockstep.launch.torchrun import Asked

_EPILOG = """\
Everything after SCRIPT belongs to the script. Flags win over the LOCKSTEP_* variables of the
environment, and these over torchrun's PET_* variables. Exit codes: 0 done, 1 the script failed,
2 usage, 3 a check did not hold, 75 preempted: the same command with --run-dir DIR continues.
The promise: a script that uses lockstep.Run gives the same weights, bit for bit, on 1 to R ranks,
with R fixed by --replicas and the threads by --threads, on one kind of hardware, with one version
of Python, PyTorch and Lockstep. Without --replicas, R is the number of ranks.
"""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """Add this verb to the command line."""
    parser = subparsers.add_parser(
        "run",
        help="launch a script on any number of ranks",
        usage="lockstep run [options] SCRIPT [ARG ...]",
        epilog=_EPILOG,
    )
    parser.advice = lambda *_: "arguments of the script come after its name"
    _add_layout(parser)
    _add_nodes(parser)
    method.add_flags(parser)
    _add_start(parser)
    _add_survival(parser)
    _add_records(parser)
    torchrun.add_flags(parser)
    parser.add_argument("target", metavar="SCRIPT", help="the script to run, or with -m a module")
    parser.add_argument("args", metavar="ARG", nargs=argparse.REMAINDER, help="arguments for it")
    parser.set_defaults(handler=handle)


def handle(options: argparse.Namespace) -> int:
    """Launch what `options` say; return the exit code."""
    from lockstep.launch import api
    from lockstep.launch.output import say
    from lockstep.launch.torchrun import asked_of

    asked = asked_of(vars(options))
    spec, notes = read(options, asked)
    for note in (*asked.notes, *notes):
        say(f"lockstep: {note}")
    return api.show_plan(spec) if options.dry_run else api.run(spec)


def read(options: argparse.Namespace, asked: Asked) -> tuple[LaunchSpec, tuple[str, ...]]:
    """Return the launch that `options` describe, and what the user is told of them.

    Args:
        options: the parsed words.
        asked: torchrun's own flags among them.

    Raises:
        UsageError: if they describe none that could work.
    """
    from lockstep.launch.spec import LaunchSpec, parse_ranks
    from lockstep.launch.torchrun import meeting

    nodes, notes = meeting(asked, _nodes(options))
    spec = LaunchSpec(
        target=options.target,
        kind=asked.kind(module=options.module),
        args=tuple(options.args),
        n=None if options.n is None else parse_ranks(options.n),
        start=asked.start(options.start),
        devices=options.devices,
        replicas=options.replicas,
        threads=options.threads,
        bind=options.bind or ("cores" if asked.numa_binding else None),
        run_dir=options.run_dir,
        fresh=options.fresh,
        log_dir=options.log_dir,
        streams=_streams(options),
        role=options.role,
        stop_on_nan=options.stop_on_nan,
        loggers=tuple(options.loggers),
        local_rank_option=options.local_rank_option,
        nodes=nodes,
        survival=_survival(options, asked),
        method=method.read(options),
    )
    return spec, notes


def _nodes(options: argparse.Namespace) -> dict[str, object]:
    """Return what the flags say of nodes, by the names of `Nodes`."""
    from lockstep.launch.nodes import parse_count

    least, count = (None, None) if options.nnodes is None else parse_count(options.nnodes)
    return {
        "count": count,
        "least": least,
        "rank": options.node_rank,
        "main_address": options.master_addr,
        "main_port": options.master_port,
        "endpoint": options.rdzv_endpoint,
        "id": options.rdzv_id,
        "interface": options.interface,
        "join_timeout": options.join_timeout,
        "last_call": options.last_call,
    }


def _streams(options: argparse.Namespace) -> Streams:
    from lockstep.launch.streams import Streams, parse_ranks_filter

    return Streams(
        redirects=options.redirects,
        tee=options.tee,
        only=parse_ranks_filter(options.local_ranks_filter or ""),
    )


def _bits_of(flag: str) -> Callable[[str], Bits]:
    """Return what reads the value of a flag; at once, since a script's name may stand in its place."""

    def read_bits(text: str) -> Bits:
        from lockstep.launch.streams import parse_bits

        return parse_bits(flag, text)

    return read_bits


def _survival(options: argparse.Namespace, asked: Asked) -> Survival:
    from lockstep.launch.survival import Survival

    return Survival(
        max_restarts=options.max_restarts,
        preempt_signal=options.preempt_signal,
        checkpoint_every=options.checkpoint_every,
        keep=options.keep,
        hang_timeout=options.hang_timeout,
        signals=asked.signals,
        shutdown_timeout=options.shutdown_timeout,
    )


def _add_layout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout")
    group.add_argument(
        "-n",
        "--nproc-per-node",
        dest="n",
        metavar="N",
        help="ranks: a number, cpu (cores), gpu, or auto (default: 1, or as many as --devices names)",
    )
    group.add_argument("--replicas", type=int, metavar="R", help="replicas of the run, at least N")
    group.add_argument(
        "--devices",
        metavar="D",
        help="what ranks compute on: auto, cpu, gpu, or a list such as 2,3 or GPU-8f5c1a2b,MIG-…",
    )
    group.add_argument("--threads", type=int, metavar="T", help="intra-op threads of each rank")
    group.add_argument(
        "--bind",
        choices=("none", "cores"),
        help="whether each rank keeps to cores of its own (default: none)",
    )


def _add_nodes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "several nodes",
        "Under Slurm and mpiexec the launchers find each other without these flags.",
    )
    group.add_argument(
        "--nnodes",
        metavar="NODES",
        help="number of nodes, each with such a launcher; MIN:MAX if they may come and go",
    )
    group.add_argument("--node-rank", type=int, metavar="K", help="number of this node, from 0")
    group.add_argument("--master-addr", metavar="HOST", help="host or address of node 0")
    group.add_argument(
        "--master-port", type=int, metavar="PORT", help="its port (default: one that is free)"
    )
    group.add_argument(
        "--rdzv-endpoint",
        metavar="PLACE",
        help="HOST[:PORT] or file:///DIRECTORY where nodes without numbers meet",
    )
    group.add_argument(
        "--rdzv-id", metavar="ID", help="tells launches that meet at one place apart"
    )
    group.add_argument(
        "--interface", metavar="NAME", help="network interface (default: one that all others reach)"
    )
    group.add_argument(
        "--join-timeout",
        type=float,
        metavar="SECONDS",
        help="how long nodes may take to come (default: 300)",
    )
    group.add_argument(
        "--last-call",
        type=float,
        metavar="SECONDS",
        help="how long a launch waits for more than MIN nodes before it begins (default: 30)",
    )


def _add_start(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("start")
    group.add_argument(
        "--start",
        choices=("fork", "spawn", "exec"),
        help="fork from a process that has imported torch (default), or a fresh interpreter each, "
        "with (spawn) or without (exec) Lockstep's error reports",
    )
    group.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module's name")
    group.add_argument(
        "--legacy-local-rank",
        dest="local_rank_option",
        action="store_const",
        const="--local-rank",
        default="auto",
        help="give each rank the option --local-rank=K; scripts that declare it get it without this flag",
    )
    group.add_argument(
        "--legacy-local_rank",
        dest="local_rank_option",
        action="store_const",
        const="--local_rank",
        help="the same for scripts that spell it --local_rank=K",
    )
    group.add_argument(
        "--no-local-rank",
        dest="local_rank_option",
        action="store_const",
        const="none",
        help="give no rank such an option, even where the script declares it",
    )
    group.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")


def _add_survival(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("survival")
    group.add_argument(
        "--max-restarts",
        type=int,
        metavar="K",
        help="failures in a row without progress after which ranks are started again (default: 3, and 0 "
        "for exceptions of the script's own and for scripts without a lockstep.Run)",
    )
    group.add_argument(
        "--preempt-signal",
        metavar="NAME",
        help="a signal that makes a run save its state and end, such as USR1; SIGTERM always does",
    )
    group.add_argument(
        "--checkpoint-every",
        type=float,
        metavar="SECONDS",
        help="time between checkpoints, 0 for none (default: 600)",
    )
    group.add_argument(
        "--keep", type=int, metavar="N", help="latest checkpoints that are kept (default: 3)"
    )
    group.add_argument(
        "--hang-timeout",
        type=float,
        metavar="SECONDS",
        help="how long a rank may show no sign of life, 0 for ever (default: 1800)",
    )


def _add_records(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("records")
    group.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="default: runs/NAME/TIME, a new one"
    )
    group.add_argument("--fresh", action="store_true", help="overwrite a finished run in DIR")
    group.add_argument(
        "-t",
        "--tee",
        type=_bits_of("--tee"),
        metavar="S",
        help="streams that are shown with a prefix: 1 is standard output, 2 standard error, 3 both; "
        "0:3,1:1 says it for each local rank (default: rank 0 is shown, without a prefix)",
    )
    group.add_argument(
        "-r",
        "--redirects",
        type=_bits_of("--redirects"),
        metavar="S",
        help="streams that only the log files receive, in the same way",
    )
    group.add_argument("--local-ranks-filter", metavar="K,…", help="show these local ranks only")
    group.add_argument(
        "--log-dir", type=Path, metavar="DIR", help="where log files go, in a new folder"
    )
    group.add_argument(
        "--logger",
        dest="loggers",
        action="append",
        default=[],
        metavar="NAME",
        help="also log to tensorboard, wandb or mlflow; may be given several times",
    )
    group.add_argument(
        "--stop-on-nan", action="store_true", help="end at a loss that is not finite"
    )
