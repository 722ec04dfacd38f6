"""`lockstep run`: launch a script on any number of ranks and nodes."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli import check, nodes, setting_flags, torchrun
from lockstep.cli.parser import RANKS, Parser, of_script
from lockstep.settings import TABLE

if TYPE_CHECKING:
    from lockstep.launch.spec import LaunchSpec
    from lockstep.launch.streams import Bits
    from lockstep.launch.torchrun import TorchrunFlags

HELP = "launch a script on any number of ranks"
USAGE = "[options] SCRIPT [ARG ...]"
EPILOG = """\
Everything after SCRIPT belongs to the script. Flags win over the LOCKSTEP_* variables of the
environment, and these over torchrun's PET_* variables. Exit codes: 0 done, 1 the script failed,
2 usage, 3 a check did not hold, 75 preempted. A command that is started again begins a new run, and
names one that it has left unfinished; with --resume, or with --run-dir DIR, it continues that one.
The promise: a script that uses lockstep.Run gives the same weights, bit for bit, on 1 to R ranks,
with R fixed by --replicas and the threads by --threads, on one kind of hardware, with one version
of Python, PyTorch and Lockstep. Without --replicas, R is the number of ranks.
"""
EXAMPLES = {
    "lockstep run -n 4 train.py --lr 0.1": "4 ranks on this machine; --lr 0.1 is for the script",
    "lockstep run -n gpu --replicas 8 train.py": "one rank for each GPU, with the result of 8 ranks",
    "lockstep run --nnodes 2 --node-rank 0 --master-addr a train.py": "2 nodes; node 1 has --node-rank 1",
    "lockstep run --resume train.py": "continue the newest unfinished run of train.py",
}


def add_flags(parser: Parser) -> None:
    """Add the flags of `lockstep run` to its parser."""
    parser.synonyms = RANKS
    parser.advice = lambda *_: "arguments of the script come after its name"
    _add_layout(parser)
    nodes.add(parser, elastic=True)
    setting_flags.add_training(parser)
    _add_start(parser)
    setting_flags.add_group(parser.add_argument_group("fault tolerance"), "fault tolerance")
    _add_records(parser)
    torchrun.add_flags(parser)
    parser.add_script()


def handle(options: argparse.Namespace) -> int:
    """Launch the script, or with `--dry-run` print what would be started; return the exit code."""
    from lockstep.launch import api
    from lockstep.launch.output import say
    from lockstep.launch.torchrun import asked_of

    asked = asked_of(vars(options))
    spec, notes = read(options, asked)
    for note in (*asked.notes, *notes):
        say(f"lockstep: {note}")
    if options.check:
        for line in check.of_target(spec.target, spec.kind):
            say(line)
    return api.show_plan(spec) if options.dry_run else api.run(spec)


def read(options: argparse.Namespace, asked: TorchrunFlags) -> tuple[LaunchSpec, tuple[str, ...]]:
    """Return the launch that the flags describe, and messages about flags without effect.

    Args:
        options: the parsed flags.
        asked: values of the flags that only torchrun has.

    Raises:
        UsageError: if flags are invalid or contradict each other.
    """
    from lockstep.launch.flag_settings import FlagSettings
    from lockstep.launch.spec import LaunchSpec, parse_ranks
    from lockstep.launch.streams import Streams, parse_ranks_filter
    from lockstep.launch.torchrun import rendezvous_nodes

    bound = {"bind": "cores"} if asked.numa_binding else {}
    flags = setting_flags.given(options, (name for name, one in TABLE.items() if one.flag))
    several, notes = rendezvous_nodes(asked, nodes.given(options))
    spec = LaunchSpec(
        target=options.target,
        kind=asked.kind(module=options.module),
        args=of_script(options.args),
        n=None if options.n is None else parse_ranks(options.n),
        start=asked.start(options.start),
        settings=FlagSettings(**bound | flags),
        signals=asked.signals,
        log_dir=options.log_dir,
        streams=Streams(
            redirects=options.redirects,
            tee=options.tee,
            only=parse_ranks_filter(options.local_ranks_filter or ""),
        ),
        role=options.role,
        local_rank_option=options.local_rank_option,
        nodes=several,
        command=_command(options),
    )
    return spec, notes


def _command(options: argparse.Namespace) -> tuple[str, ...]:
    """Return the arguments of this `lockstep run` without `--run-dir`, `--resume` and `--fresh`.

    A message about a preempted run shows them in the command that continues the run.
    """
    script = [options.target, *options.args]
    flags, kept = iter(options.words[1 : -len(script)]), []
    for word in flags:
        flag = word.replace("_", "-")
        if flag == "--run-dir":
            next(flags, None)
        elif flag not in ("--resume", "--fresh") and not flag.startswith("--run-dir="):
            kept.append(word)
    return (*kept, *script)


def _bits(flag: str, text: str) -> Bits:
    """Parse the value of `flag`, which is `--tee` or `--redirects`."""
    from lockstep.launch.streams import parse_bits

    return parse_bits(flag, text)


def _add_layout(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("layout")
    group.add_argument(
        "-n",
        "--nproc-per-node",
        dest="n",
        metavar="N",
        help="number of ranks, or cpu (one per core), gpu (one per GPU), auto (gpu, else cpu) "
        "(default: 1, or one for each of --devices)",
    )
    setting_flags.add_group(group, "layout")


def _add_start(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("start")
    add = group.add_argument
    add(
        "--start",
        choices=("fork", "spawn", "exec"),
        help="how ranks start: fork of a process that has imported torch (default), spawn of a fresh "
        "interpreter, or exec of python SCRIPT, without Lockstep's error reports",
    )
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as with python -m")
    add(
        "--legacy-local-rank",
        dest="local_rank_option",
        action="store_const",
        const="--local-rank",
        default="auto",
        help="pass --local-rank=K to each rank; scripts that declare the option get it without this flag",
    )
    add(
        "--legacy-local_rank",
        dest="local_rank_option",
        action="store_const",
        const="--local_rank",
        help="pass --local_rank=K to each rank",
    )
    add(
        "--no-local-rank",
        dest="local_rank_option",
        action="store_const",
        const="none",
        help="pass neither option, even to a script that declares it",
    )
    add("--dry-run", action="store_true", help="print the plan and start nothing")
    add(
        "--check",
        action="store_true",
        help="before the launch, show the findings of lockstep check on SCRIPT",
    )


def _add_records(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("records")
    add = group.add_argument
    setting_flags.add_group(group, "records")
    add(
        "-t",
        "--tee",
        type=partial(_bits, "--tee"),
        metavar="S",
        help="streams to show with a prefix per rank: 1 is stdout, 2 stderr, 3 both; 0:3,1:1 chooses for "
        "each local rank (default: rank 0, without a prefix)",
    )
    add(
        "-r",
        "--redirects",
        type=partial(_bits, "--redirects"),
        metavar="S",
        help="streams to write to the log files only; values as for --tee",
    )
    add("--local-ranks-filter", metavar="K,…", help="show these local ranks only")
    add(
        "--log-dir",
        type=Path,
        metavar="DIR",
        help="directory of log files; a launch makes a new folder in it",
    )
