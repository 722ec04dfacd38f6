"""`lockstep verify`: run a script on several layouts (numbers of ranks), and compare the results."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from lockstep.cli.parser import Parser
from lockstep.cli.several_launches import add_shared_flags, kept_directory, run_command
from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.tools.verify.comparison import VerifyResult
    from lockstep.tools.verify.layouts import RandomKills
    from lockstep.tools.verify.running import LayoutResult

HELP = "prove that a script gives the same weights on every layout"
USAGE = "[options] SCRIPT [[--] ARG ...]"
EPILOG = """\
A layout is a number of ranks, or ranks that change on the way: "4>2@30>3@60" begins on 4, continues with
2 after step 30 and with 3 after step 60. Faults follow after commas: "2,kill@30" kills a rank in step
30, "2,term@25" preempts the run after step 25. Arguments for the script come last, or after `--`. A script
that names no replicas gets as many as the largest layout has ranks. Exit codes: 0 the same on all
layouts, 1 the script failed, 2 usage, 3 not the same. The promise that is
checked: the same weights on 1 to R ranks, for R replicas (--replicas), T threads (--threads), one
kind of hardware, and one version of Python, PyTorch and Lockstep.
"""
EXAMPLES = {
    "lockstep verify train.py --layouts 1,2,4": "compare 1, 2 and 4 ranks",
    'lockstep verify train.py --layouts 1 "4>2@30" "2,kill@30"': "with fewer ranks, and with a kill",
    "lockstep verify train.py --layouts 1,2 -- --epochs 1": "--epochs 1 is for the script",
    "lockstep verify train.py --layouts 1,2 --strategies ddp,fsdp": "compare strategies as well",
}
#: Number of the runs' warnings that are shown.
_WARNINGS = 5
#: Pattern of a further layout after `--layouts LAYOUT`; no script has such a name.
_LAYOUT = re.compile(r"\d+([,>@].*)?|[a-z]+@\d+(,.*)?")


def add_flags(parser: Parser) -> None:
    """Add the flags of `lockstep verify` to its parser."""
    add = parser.add_argument
    add(
        "--layouts",
        action="append",
        metavar="LAYOUT …",
        help='layouts to compare, such as 1,2,4 or 1 "4>2@30" "2,kill@30" (default: 1,2)',
    )
    add("--strategies", metavar="S,…", help="run each layout with each strategy: ddp,ps,fsdp")
    add("--kills", type=int, metavar="K", help="add a layout in which K random workers are killed")
    add("--seed", type=int, metavar="S", help="seed of the times of the kills (default: 0)")
    add("--json", action="store_true", help="print the verdict as JSON")
    add_shared_flags(
        parser,
        "verify",
        replicas="replicas on all layouts (default: the ranks of the largest layout)",
        kept="keep the run directories and traces in DIR",
    )


def one_layout_each(words: Sequence[str]) -> list[str]:
    """Return `words` with `--layouts A B` rewritten as `--layouts A --layouts B`.

    Each `--layouts` then has a single value, so that argparse does not take SCRIPT for a layout.
    """
    done: list[str] = []
    follows = False
    for word in words:
        if follows and done[-1] != "--layouts":
            follows = _LAYOUT.fullmatch(word) is not None
            done += ["--layouts"] * follows
        done.append(word)
        follows = follows or word == "--layouts"
    return done


def handle(options: argparse.Namespace) -> int:
    """Run the script on all layouts, and print the comparison of the results.

    Returns the exit code, 3 if the results differ.
    """
    from lockstep.tools.verify.comparison import judge
    from lockstep.tools.verify.layouts import parse
    from lockstep.tools.verify.running import RunSpec, outcomes

    command, strategies = run_command(options)
    layouts = parse(options.layouts or ["1,2"], _random_kills(options), strategies)
    work = RunSpec(command, replicas=max(layout.ranks for layout in layouts))
    with kept_directory(options.keep_runs, "verify") as directory:
        done = []
        for outcome in outcomes(layouts, work, directory):
            done.append(outcome)
            if not options.json:
                _show_outcome(outcome)
        verdict = judge(done)
    if options.json:
        print(json.dumps(verdict.as_json()))
    else:
        _show(verdict)
    return 0 if verdict.holds else 3


def _random_kills(options: argparse.Namespace) -> RandomKills | None:
    from lockstep.tools.verify.layouts import RandomKills

    if options.kills is None:
        if options.seed is not None:
            raise UsageError(
                "--seed without --kills; expected both: it draws the moments of the kills",
                hint="the seed of a run is set in its script, or by LOCKSTEP_SEED",
            )
        return None
    if options.kills < 1:
        raise UsageError(f"--kills is {options.kills}; expected at least 1")
    return RandomKills(options.kills, options.seed or 0)


def _show_outcome(outcome: LayoutResult) -> None:
    from lockstep.tools.quantities import counted

    kills, generations = counted(outcome.kills, "kill"), counted(outcome.generations, "generation")
    endured = f"{kills}, {generations}, " if outcome.layout.is_disturbed else ""
    lines = [f"ran on {outcome.layout}: {outcome.steps} steps, {endured}{outcome.seconds:.1f} s"]
    if outcome.differs:
        lines.append(outcome.complaint)
    random_kills = outcome.layout.random_kills
    if random_kills is not None and outcome.kills < random_kills.kills:
        few = f"{outcome.kills} of {random_kills.kills} kills"
        lines.append(f"lockstep: the run came to its end after {few}")
    print(*lines, sep="\n", file=sys.stderr)


def _show(verdict: VerifyResult) -> None:
    from rich.console import Console
    from rich.table import Table

    from lockstep.tools.quantities import counted

    disturbed = any(outcome.layout.is_disturbed for outcome in verdict.outcomes)
    named = any(outcome.layout.strategy is not None for outcome in verdict.outcomes)
    more = ("kills",) if disturbed else ()
    table = Table(*(("strategy",) * named), "layout", "steps", *more, "seconds", "digest")
    table.columns[-1].no_wrap, table.columns[-1].min_width = True, 16  # whole on narrow terminals
    for outcome in verdict.outcomes:
        digest = (outcome.digest or "none").removeprefix("sha256:")[:16]
        counts = (str(outcome.kills),) if disturbed else ()
        cells = (outcome.layout.name, str(outcome.steps), *counts, f"{outcome.seconds:.1f}", digest)
        table.add_row(*((outcome.layout.strategy or "",) * named), *cells)
    Console().print(table)
    print(f"same: {'yes' if verdict.same else 'no'}")
    if not any(outcome.steps or outcome.differs for outcome in verdict.outcomes):
        print("no steps: only the final weights were compared; pass the optimizer to run.optimizer")
    if verdict.difference is not None:
        print(f"first difference: {verdict.difference.text}")
    seen = verdict.coverage
    loops = counted(seen.loops, "loop")
    print(f"samples: {loops} checked, {len(seen.twice)} seen twice, {len(seen.never)} never")
    for title, samples in (("twice", seen.twice), ("never", seen.never)):
        for loader, epoch, sample in samples[:3]:
            print(f"  {title}: sample {sample} of loader {loader} in epoch {epoch}")
    for text in verdict.warnings[:_WARNINGS]:
        print(f"warning: {text}")
    if (left := len(verdict.warnings) - _WARNINGS) > 0:
        print(f"and {counted(left, 'more warning')}: --keep-runs DIR keeps the logs")
