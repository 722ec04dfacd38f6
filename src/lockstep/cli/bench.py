"""`lockstep bench`: measure a script on several numbers of ranks, and predict its time on others."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli.parser import Parser
from lockstep.cli.several_launches import add_shared_flags, kept_directory, run_command
from lockstep.errors import OutputError, UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.tools.bench.benchmark import Benchmark
    from lockstep.tools.bench.projection import Link
    from lockstep.tools.bench.traffic import Layout

HELP = "measure a script on several layouts, and project it to others"
USAGE = "[options] SCRIPT [[--] ARG ...]"
EPILOG = """\
The script runs on every combination of ranks, strategies and exchanges, K times, in rounds: all
combinations, then all again. The first step of each run is left out. Arguments for the script come
last, or after `--`. A script without lockstep.Run is measured by its wall time. Without SCRIPT, --project
computes the steps of given --gradients and --compute; nothing runs. Exit codes: 0 done, 1 the script failed
on a layout (the others are reported), 2 usage, or results that do not compare.
"""
EXAMPLES = {
    "lockstep bench train.py --ranks 1,2,4": "compare 1, 2 and 4 ranks",
    "lockstep bench train.py --project 8,64 --html bench.html": "project to 8 and 64 ranks, with charts",
    "lockstep bench train.py --project 2x8,8x8 --bandwidth 25Gbit/s": "project to 2 and 8 hosts of 8 ranks",
    "lockstep bench train.py -- --epochs 1": "--epochs 1 is for the script",
}


_LINK = {
    "--bandwidth": "bandwidth of each projected host's network, such as 25Gbit/s",
    "--latency": "latency of the projected network, such as 20us",
    "--local-bandwidth": "bandwidth of a rank within a projected host, such as 200GB/s",
    "--local-latency": "latency of a message within a projected host, such as 2us",
}


def add_flags(parser: Parser) -> None:
    """Add the flags of `lockstep bench` to its parser."""
    add = parser.add_argument
    add("--ranks", default="1,2", metavar="N,…", help="numbers of ranks (default: 1,2)")
    add(
        "--strategies",
        metavar="S,…",
        help="run each number of ranks with each strategy: ddp,fsdp,ps",
    )
    add(
        "--exchanges",
        metavar="E,…",
        help="run each number of ranks with each exchange: tree,shared-memory",
    )
    add("--repeat", type=int, default=3, metavar="K", help="number of measured rounds (default: 3)")
    add(
        "--restart",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure a restart after a kill, in one more launch of each combination (the default)",
    )
    add(
        "--project",
        metavar="N,HxR,…",
        help="fit a model to the results, and project them to these numbers of ranks, or hosts x ranks",
    )
    for flag, help_ in _LINK.items():
        add(flag, metavar="L" if "latency" in flag else "B", help=help_)
    add("--gradients", metavar="BYTES", help="without SCRIPT: size of all gradients, such as 14GB")
    add("--compute", metavar="T", help="without SCRIPT: time of a step without its exchange: 300ms")
    add(
        "--compare",
        metavar="FILE",
        help="compare with an earlier result: a file of --json, or a table",
    )
    add("--json", type=Path, metavar="FILE", help="write the results to FILE")
    add("--html", type=Path, metavar="FILE", help="write a page with charts to FILE")
    add_shared_flags(
        parser,
        "bench",
        replicas="replicas on all layouts (default: the number of ranks)",
        threads="intra-op threads per rank (default: the script's, else cores / the most ranks)",
        kept="keep the run directories in DIR",
    )
    (script,) = (action for action in parser._actions if action.dest == "target")
    script.nargs, script.required = "?", False  # not needed with --gradients


def handle(options: argparse.Namespace) -> int:
    """Measure the script on the requested numbers of ranks, or only predict times from given numbers.

    Print the results, and return the exit code: 1 if a launch failed.
    """
    if options.target is None:
        return _show_given(options)
    for flag in ("--gradients", "--compute"):
        if _value(options, flag) is not None:
            raise UsageError(
                f"{flag} beside {options.target}; expected one of them, for the script is measured",
                hint="lockstep bench --project 8x8 --gradients 14GB --compute 300ms … runs no script",
            )
    benchmark = _benchmark(options)
    _check_outputs(options)
    with kept_directory(options.keep_runs, "bench") as directory:
        content = benchmark.run(directory, _report, keep=options.keep_runs is not None)
    try:
        benchmark.compare(content)
    finally:  # the results are written, also if they do not compare
        _write(content, options)
    return 1 if any(row["verdict"] for row in content["results"]) else 0


def _benchmark(options: argparse.Namespace) -> Benchmark:
    from lockstep.launch.command import choose_exchanges
    from lockstep.tools.bench.benchmark import Benchmark
    from lockstep.tools.bench.combinations import combine, parse_counts

    command, strategies = run_command(options, "exchange")
    exchanges = choose_exchanges(options.exchange, options.exchanges)
    link, wanted = _projected(options)
    return Benchmark(
        command=command,
        combinations=combine(parse_counts("--ranks", options.ranks), strategies, exchanges),
        repeat=options.repeat,
        restarts=options.restart,
        wanted=wanted,
        link=link,
        other=options.compare,
    )


def _projected(options: argparse.Namespace) -> tuple[Link, Sequence[Layout]]:
    """Return the network speeds given by flags, and the layouts whose times `--project` is to predict."""
    from lockstep.tools.bench.combinations import parse_layouts
    from lockstep.tools.bench.projection import Link
    from lockstep.tools.quantities import parse_bandwidth, parse_latency

    given = {flag: _value(options, flag) for flag in _LINK}
    known = {}
    for flag, value in given.items():
        if value is not None and options.project is None:
            raise UsageError(
                f"{flag} without --project; expected both: it is of the network to project to",
                hint=f"for example --project 8,64 {flag} {value}",
            )
        parse = parse_latency if "latency" in flag else parse_bandwidth
        known[flag] = None if value is None else parse(value, flag)
    link = Link(*known.values())
    return link, parse_layouts("--project", options.project, link) if options.project else []


def _value(options: argparse.Namespace, flag: str) -> str | None:
    value: str | None = getattr(options, flag.removeprefix("--").replace("-", "_"))
    return value


def _show_given(options: argparse.Namespace) -> int:
    """Print predicted times of a step, from `--gradients` and `--compute`; return exit code 0.

    No script runs.
    """
    from lockstep.tools.bench.projecting import StepAssumptions
    from lockstep.tools.quantities import parse_latency, parse_size

    if None in (options.gradients, options.compute, options.project):
        raise UsageError(
            "no SCRIPT; expected one, or --project with --gradients and --compute",
            hint="lockstep bench train.py, or lockstep bench --project 8x8 --gradients 14GB --compute "
            "300ms --bandwidth 400Gbit/s --local-bandwidth 200GB/s",
        )
    for flag in ("--compare", "--html", "--strategy", "--strategies", "--exchange", "--exchanges"):
        if _value(options, flag) is not None:
            raise UsageError(
                f"{flag} without SCRIPT; expected it only where a script is measured",
                hint=f"leave out {flag}, or name a script in place of --gradients and --compute",
            )
    link, wanted = _projected(options)
    _check_outputs(options)
    given = StepAssumptions(
        gradients=parse_size(options.gradients, "--gradients"),
        compute=parse_latency(options.compute, "--compute"),
        wanted=wanted,
        link=link,
        on_cpu=options.devices != "gpu",
    )
    _write(given.content(), options)
    return 0


def _check_outputs(options: argparse.Namespace) -> None:
    """Raise a `UsageError` if `--json` or `--html` names a file that cannot be written.

    It is called before anything is measured. With `--html` it also raises if plotly is not installed.
    """
    if options.html is not None:
        from lockstep.tools.report.page import graph_objects

        graph_objects()
    for flag, path in (("--json", options.json), ("--html", options.html)):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise UsageError(f"{flag} {path}: expected a file in a directory that exists")


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _write(content: dict[str, Any], options: argparse.Namespace) -> None:
    """Print the results in `content`, and write them to the files of `--json` and `--html`."""
    from rich.console import Console

    from lockstep.tools.bench import table

    table.show(content, Console())
    if options.json is not None:
        try:
            options.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{options.json} cannot be written: {error.strerror}") from None
    if options.html is not None:
        from lockstep.tools.bench.charts import write

        write(options.html, content)
