"""`lockstep replay`: compute steps of a recorded run again, and compare them with its records."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli.parser import Parser
from lockstep.cli.several_launches import kept_directory
from lockstep.errors import RunError, ScriptNotFoundError, UsageError

if TYPE_CHECKING:
    from lockstep.tools.replay.comparison import Comparison

HELP = "compute any step of a run again, on one process, and compare the bits"
USAGE = "[options] RUN_DIR"
EPILOG = """\
The script that the run recorded is started again in a temporary run directory, with the recorded
arguments, seed, replicas and threads, from the newest checkpoint before the step, or else from its start.
The run itself is only read. Compared are the samples and losses of each replica, and the hashes of
gradients and parameters that were recorded (--hash-every). Without --step, all steps from the first are
computed. Exit codes: 0 the same, 1 the script failed with --pdb or --anomaly, 2 usage, 3 not the same,
125 the script failed or is gone, so that git bisect run skips the commit.
"""
EXAMPLES = {
    "lockstep replay runs/train/20261122-103512 --step 48211": "one step, all replicas",
    "lockstep replay runs/train/20261122-103512 --step 48211 --replica 37 --pdb": "in the debugger",
    "git bisect run lockstep replay runs/train/20261122-103512 --until 200": "which commit changed bits?",
}
#: Exit code if nothing can be compared; `git bisect run` skips a commit that has it.
UNTESTABLE = 125
#: Number of steps whose values are printed; of more steps only the first difference.
_SHOWN = 3


def add_flags(parser: Parser) -> None:
    """Add the flags of `lockstep replay` to its parser."""
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN_DIR", help="the directory of the run")
    add("--step", type=int, metavar="N", help="the step to compute, counted from 1")
    add("--until", type=int, metavar="M", help="compute the steps N to M (default: N)")
    add(
        "--replica",
        type=int,
        metavar="R",
        help="show this replica only; with --pdb, stop before it",
    )
    add(
        "--pdb",
        action="store_true",
        help="stop in the debugger before the microbatch, in the loop's body",
    )
    add("--anomaly", action="store_true", help="switch on torch's anomaly detection in step N")
    add("-n", type=int, default=1, metavar="N", help="number of ranks (default: 1)")
    add(
        "--devices",
        metavar="D",
        help="devices of the ranks (default: the recorded kind, if there is one)",
    )
    add("--keep-runs", type=Path, metavar="DIR", help="keep the run directory of the replay in DIR")
    add("--json", action="store_true", help="print the result as JSON")


def handle(options: argparse.Namespace) -> int:
    """Compute steps of the recorded run again, and print whether they have the recorded bits.

    Return the exit code: 3 if a value differs from its record.
    """
    from lockstep.tools.replay.comparison import Comparison
    from lockstep.tools.replay.recorded import RecordedRun
    from lockstep.tools.replay.replaying import ReplayOptions, replay

    if options.step is None and options.until is None:
        raise UsageError("neither --step nor --until is given; expected the step to compute again")
    if options.pdb and options.n > 1:
        raise UsageError(f"--pdb with -n {options.n}; expected one rank, whose terminal this is")
    step = 1 if options.step is None else options.step
    asked = ReplayOptions(
        step=step,
        until=step if options.until is None else options.until,
        replica=options.replica,
        debugs=options.pdb,
        anomaly=options.anomaly,
        ranks=options.n,
        devices=options.devices,
    )
    try:
        run = RecordedRun.of(options.run_dir)
        asked.check(run)
        with kept_directory(options.keep_runs, "replay") as directory:
            result = Comparison(run, asked, replay(run, asked, directory.absolute()))
    except (RunError, ScriptNotFoundError) as error:
        if not asked.is_shown:
            error.exit_code = UNTESTABLE
        raise
    if options.json:
        print(json.dumps(result.as_json()))
    else:
        _show(result)
    return 0 if result.same or (asked.is_shown and result.difference is None) else 3


def _show(result: Comparison) -> None:
    facts = result.as_json()
    for note in facts["notes"]:
        print(f"lockstep: note: {note}", file=sys.stderr)
    begin = facts["begin"]
    print(
        f"replayed from {f'the state after step {begin}' if begin else 'the start of the script'}"
    )
    if result.asked.until - result.asked.step < _SHOWN:
        _show_values(facts)
    print(f"same: {'yes' if facts['same'] else 'no'} ({facts['compared']} values compared)")
    if facts["difference"] is not None:
        print(f"first difference: {facts['difference']}")


def _show_values(facts: dict[str, Any]) -> None:
    seen = {(one["step"], one["replica"]): one["samples"] for one in facts["samples"]}
    for one in facts["losses"]:
        samples = seen.get((one["step"], one["replica"]), [])
        place = f"step {one['step']}, replica {one['replica']}"
        print(f"{place}: loss {one['value']} ({one['bits']}, {_verdict(one)}), samples {samples}")
    for one in facts["hashes"]:
        print(f"step {one['step']}: {one['of']} {one['bits']} ({_verdict(one)})")


def _verdict(one: dict[str, str | None]) -> str:
    if one["recorded"] is None:
        return "not recorded"
    return "as recorded" if one["recorded"] == one["bits"] else f"recorded {one['recorded']}"
