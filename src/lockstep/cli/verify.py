"""`lockstep verify`: prove on a script that the layout does not change the result."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.errors import UsageError

if TYPE_CHECKING:
    from lockstep.verify.running import Outcome
    from lockstep.verify.verdict import Verdict

_EPILOG = """\
Arguments for the script come after `--`. A script that names no replicas gets as many as the
largest layout has ranks. Exit codes: 0 the same on all layouts, 1 the script failed, 2 usage, 3 not
the same.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this verb to the command line."""
    parser = subparsers.add_parser(
        "verify",
        help="prove that a script gives the same weights on every layout",
        usage="lockstep verify [options] SCRIPT [-- ARG ...]",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--layouts", default="1,2", metavar="N,N,…", help="numbers of ranks (default: 1,2)"
    )
    parser.add_argument("--replicas", type=int, metavar="R", help="replicas on all layouts")
    parser.add_argument("--threads", type=int, metavar="T", help="intra-op threads of each rank")
    parser.add_argument("--devices", choices=("auto", "cpu", "gpu"), help="what ranks compute on")
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep runs and traces in DIR")
    parser.add_argument("target", metavar="SCRIPT", help="the script to verify")
    parser.set_defaults(handler=handle)


def split(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Cut the arguments of the script off the command line of this verb: those after `--`.

    argparse takes options after SCRIPT only where nothing of the script's follows them.
    """
    if words[:1] != ["verify"] or "--" not in words:
        return words, []
    cut = list(words).index("--")
    return words[:cut], words[cut + 1 :]


def handle(options: argparse.Namespace) -> int:
    """Verify what `options` say; return the exit code."""
    from lockstep.launch.target import check_script
    from lockstep.verify.layouts import parse
    from lockstep.verify.verdict import judge, outcomes

    layouts = parse(options.layouts)
    check_script(options.target)
    command = [options.target, *options.script_args]
    with _directory(options.keep) as directory:
        done = []
        for outcome in outcomes(layouts, command, _run_options(options), directory):
            done.append(outcome)
            if not options.json:
                _show_outcome(outcome)
        verdict = judge(done)
    if options.json:
        print(json.dumps(verdict.as_json()))
    else:
        _show(verdict)
    return 0 if verdict.holds else 3


def _run_options(options: argparse.Namespace) -> list[str]:
    named = {"--replicas": options.replicas, "--threads": options.threads}
    named["--devices"] = options.devices
    return [
        word for flag, value in named.items() if value is not None for word in (flag, str(value))
    ]


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    if keep is not None:
        if keep.exists():
            raise UsageError(
                f"{keep} exists already; expected a new directory", hint="name another with --keep"
            )
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="lockstep-verify-") as directory:
        yield Path(directory)


def _show_outcome(outcome: Outcome) -> None:
    print(
        f"ran on {outcome.layout}: {outcome.steps} steps, {outcome.seconds:.1f} s", file=sys.stderr
    )


def _show(verdict: Verdict) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("layout", "steps", "seconds", "digest")
    for outcome in verdict.outcomes:
        digest = (outcome.digest or "none").removeprefix("sha256:")
        table.add_row(
            outcome.layout.name, str(outcome.steps), f"{outcome.seconds:.1f}", digest[:16]
        )
    Console().print(table)
    print(f"same: {'yes' if verdict.same else 'no'}")
    if not any(outcome.steps for outcome in verdict.outcomes):
        print("no steps: only the final weights were compared; pass the optimizer to run.optimizer")
    if verdict.difference is not None:
        print(f"first difference: {verdict.difference.text}")
    seen = verdict.coverage
    print(f"samples: {seen.loops} loops, {len(seen.twice)} seen twice, {len(seen.never)} never")
    for title, samples in (("twice", seen.twice), ("never", seen.never)):
        for loader, epoch, sample in samples[:3]:
            print(f"  {title}: sample {sample} of loader {loader} in epoch {epoch}")
